/** The steps of an ensemble as a graph from left to right, with the times at which tensors exist on its edges. */

import {h, s} from "../dom.js"
import {count, duration, rate} from "../format.js"
import {route} from "../route.js"

const WIDTH = 190
const GAP = 130
const PORT = 36
const HEAD = 80
const SPACE = 22
/** The graph shrinks to its card down to this scale, then it scrolls. */
const READABLE = 0.85

const mean = (step, ...parts) => (step?.count ? parts.reduce((sum, part) => sum + (step[part] ?? 0), 0) / step.count / 1e9 : 0)
const waits = step => mean(step, "queue_ns")
const runs = step => mean(step, "input_ns", "infer_ns", "output_ns")
const cut = (text, limit) => (text.length > limit ? `${text.slice(0, limit - 1)}…` : text)
const text = (x, y, value, kind) => s(`text.${kind}`, {x, y}, value)

/** Places the request, the steps and the response. `ready`: mean seconds from the request to the box's outputs, along the
 * slowest way. `via` of an edge: where it passes other boxes. */
function layout({steps, inputs, outputs}) {
	const make = (name, reads, writes, step) => ({name, reads, writes, step, column: 0, ready: 0, height: HEAD + Math.max(reads.length, writes.length) * PORT})
	const source = make("Request", [], inputs)
	const boxes = steps.map(step => make(step.model, Object.values(step.inputs), Object.values(step.outputs), step))
	const sink = make("Response", outputs, [])
	const all = [source, ...boxes, sink]
	const writer = new Map(all.flatMap(box => box.writes.map(tensor => [tensor, box])))
	for (const _ of all) {
		for (const box of all.slice(1)) {
			const from = box.reads.map(tensor => writer.get(tensor) ?? source)
			box.column = Math.max(0, ...from.map(({column}) => column)) + 1
			box.ready = Math.max(0, ...from.map(({ready}) => ready)) + waits(box.step) + runs(box.step)
		}
	}
	sink.column = Math.max(...boxes.map(({column}) => column)) + 1
	const columns = Array.from({length: sink.column + 1}, (_, at) => all.filter(({column}) => column === at))
	const edges = all.flatMap(to => to.reads.filter(tensor => writer.has(tensor)).map(tensor => ({tensor, to, from: writer.get(tensor)})))
	for (const edge of edges) {
		edge.via = columns.slice(edge.from.column + 1, edge.to.column).map(column => column[column.push({height: 10}) - 1])
	}
	const tall = columns.map(column => column.reduce((sum, box) => sum + box.height + SPACE, -SPACE))
	const height = Math.max(...tall)
	columns.forEach((column, at) => {
		let y = (height - tall[at]) / 2
		for (const box of column) {
			Object.assign(box, {x: at * (WIDTH + GAP), y})
			y += box.height + SPACE
		}
	})
	return {boxes: all, edges, width: columns.length * (WIDTH + GAP) - GAP, height}
}

function drawEdge({tensor, from, to, via}) {
	const port = (box, list) => box.y + HEAD - 14 + list.indexOf(tensor) * PORT
	const [x, y] = [from.x + WIDTH, port(from, from.writes)]
	const points = [...via.map(box => [box.x, box.y + 5]), [to.x, port(to, to.reads)]]
	let path = `M${x} ${y}`
	let level = y
	for (const [end, next] of points) {
		path += `C${end - GAP / 2} ${level} ${end - GAP / 2} ${next} ${end} ${next}${end < to.x ? `h${WIDTH}` : ""}`
		level = next
	}
	const time = from.step?.count ? duration(from.ready) : ""
	const about = `${tensor}${time && `, written by ${from.name} ${time} after the request`}`
	const wait = to.step?.count ? `, waits ${duration(waits(to.step))} for ${to.name}` : ""
	return s("g.edge", {"data-tensor": tensor}, s("title", about + wait), s("path", {d: path}), text(x + 8, y - 5, cut(tensor, 18)), text(x + 8, y + 14, time, "time"))
}

function drawBox({step, name, x, y, height}, busy) {
	const time = step?.count ? `waits ${duration(waits(step))}, runs ${duration(runs(step))}` : ""
	const flow = step ? `${rate(busy ? step.rate : 0)}/s${step.failed ? `, ${count(step.failed)} of ${count(step.count)} failed` : ""}` : ""
	const node = s("g", {"data-step": step?.index}, s("rect", {x, y, width: WIDTH, height, rx: 8}),
		text(x + 12, y + 22, cut(name, 23), "name"), text(x + 12, y + 40, time), text(x + 12, y + 57, flow, step?.failed ? "failing" : "flow"))
	return step ? s("a", {href: route(step.model, step.version)}, node) : node
}

/** `busy`: requests were answered in the last interval. */
export function graph(document, busy) {
	const {boxes, edges, width, height} = layout(document)
	const picture = s("svg", {"data-graph": "", viewBox: `-1 -1 ${width + 2} ${height + 2}`, role: "group", label: "Graph of the ensemble"},
		edges.map(drawEdge), boxes.map(box => drawBox(box, busy)))
	picture.style.maxWidth = `${width + 2}px`
	picture.style.minWidth = `${READABLE * width}px`
	return h("div.scroll", {tabindex: 0, role: "region", label: "Steps"}, picture)
}
