/** The answer: each output as table, bars or picture. */

import {bars} from "../charts.js"
import {h, panel, set, table, write} from "../dom.js"
import {element} from "../format.js"
import {drawTensor, imageLayout} from "./image.js"
import {textOf} from "./tensors.js"

const ROWS = 100
const COLUMNS = 16
const text = value => (value instanceof Uint8Array ? textOf(value) : element(value))

/** `classes`: whether the values are "value:index:label". */
export function result(output, classes) {
	const {name, datatype, shape, values} = output
	const layout = datatype !== "BYTES" && imageLayout(shape)
	const file = /^(\x89PNG|\xff\xd8\xff|GIF8|RIFF)/.test(String.fromCharCode(...(values[0]?.slice?.(0, 4) ?? [])))
	const ways = {
		bars: classes && (() => draw(values.map(labelled))),
		picture: (layout || file) && (() => picture(output, layout)),
		table: () => valueTable(output),
	}
	const body = h("div")
	const chips = Object.keys(ways).filter(way => ways[way]).map(way => h("button.chip", {onclick: () => choose(way)}, way))
	function choose(way) {
		chips.forEach(chip => set(chip, "aria-pressed", `${chip.textContent === way}`))
		set(body, "data-result", way)
		body.replaceChildren(ways[way]())
	}
	choose(classes ? "bars" : ways.picture ? "picture" : "table")
	const node = panel(name, "wide", h("div.chips", {role: "group", label: `Show ${name} as`}, chips), body)
	write(node.firstChild.lastChild, `${datatype} [${shape.join(", ")}]`)
	set(node, "data-output", name)
	return node
}

function labelled(value) {
	const [number, index, ...label] = textOf(value).split(":")
	return [Number(number), label.join(":") || `class ${index}`]
}

function draw(rows) {
	const numbers = rows.map(([number]) => number)
	const low = Math.min(0, ...numbers)
	const range = Math.max(1, ...numbers) - low
	return bars("Classes", rows.map(([number, label]) => ({label, text: element(number), value: (number - low) / range})))
}

function picture({name, datatype, values}, layout) {
	if (!layout) return h("img", {src: URL.createObjectURL(new Blob([values[0]])), alt: name, onload: ({target}) => URL.revokeObjectURL(target.src)})
	const canvas = h("canvas", {role: "img", label: `${name}, ${layout.width} by ${layout.height} pixels`})
	drawTensor(values, datatype, layout, canvas)
	return canvas
}

function valueTable({name, datatype, shape, values}) {
	const width = shape.length > 1 ? shape.at(-1) : 1
	const rows = values.length / width || 0
	const heads = Array.from({length: Math.min(width, COLUMNS)}, (_, at) => (datatype === "BYTES" ? "" : "#") + (width > 1 ? at : "Value"))
	const cells = Array.from({length: Math.min(rows, ROWS)}, (_, row) =>
		[h("span.soft", `${row}`), ...heads.map((_, at) => text(values[row * width + at]))])
	const part = (rows > ROWS || width > COLUMNS) && `${cells.length} of ${rows} rows, ${heads.length} of ${width} columns`
	return h("div", table(name, ["", ...heads], cells), h("p.hint", part))
}
