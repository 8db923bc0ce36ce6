/** The answer: each output as table, bars, picture or JSON. */

import { bars } from "../charts.js";
import { h, set, table } from "../dom.js";
import { element } from "../format.js";
import { drawTensor, imageLayout } from "./image.js";
import { nested, textOf } from "./tensors.js";

const ROWS = 100;
const COLUMNS = 16;
const MOST_BARS = 20;
const MOST_JSON = 10_000;
const text = (value) => (value instanceof Uint8Array ? textOf(value) : element(value));

/** The panel of an output. `classes`: whether its values are "value:index:label". */
export function result(output, classes) {
	const { name, datatype, shape, values } = output;
	const layout = datatype !== "BYTES" && imageLayout(shape);
	const file = /^(\x89PNG|\xff\xd8\xff|GIF8|RIFF)/.test(String.fromCharCode(...(values[0]?.slice?.(0, 4) ?? [])));
	const several = shape.length && shape.at(-1) === values.length && values.length > 1 && datatype !== "BYTES";
	const ways = {
		bars: (classes || several) && (() => draw(classes ? values.map(labelled) : best(values))),
		picture: (layout || file) && (() => picture(output, layout)),
		table: () => valueTable(output),
		json: () => h("pre", { tabindex: 0 }, values.length > MOST_JSON ? `more than ${MOST_JSON} values`
			: nested(values, shape, (value) => (datatype === "BYTES" ? JSON.stringify(textOf(value)) : String(value)))),
	};
	const body = h("div");
	const chips = Object.keys(ways).filter((way) => ways[way]).map((way) => h("button.chip", { type: "button", onclick: () => choose(way) }, way));
	function choose(way) {
		chips.forEach((chip) => set(chip, "aria-pressed", `${chip.textContent === way}`));
		set(body, "data-result", way);
		body.replaceChildren(ways[way]());
	}
	choose(classes ? "bars" : ways.picture ? "picture" : "table");
	return h("section.panel.wide", { "data-output": name }, h("h2", `${name} `, h("span.hint", `${datatype} [${shape.join(", ")}]`)),
		h("div.chips", { role: "group", "aria-label": `Show ${name} as` }, chips), body);
}

function labelled(value) {
	const [number, index, ...label] = textOf(value).split(":");
	return [Number(number), label.join(":") || `class ${index}`];
}

function best(values) {
	return values.map((value, index) => [Number(value), `[${index}]`]).sort(([one], [other]) => other - one).slice(0, MOST_BARS);
}

/** Bars on a scale of 0 to 1 if that has room for all, otherwise from the least to the greatest. */
function draw(rows) {
	const numbers = rows.map(([number]) => number);
	const low = Math.min(0, ...numbers);
	const high = Math.max(...numbers);
	const range = low === 0 && high <= 1 ? 1 : high - low;
	return bars("Classes", rows.map(([number, label]) => ({ label, text: element(number), value: (number - low) / range })));
}

function picture({ name, datatype, values }, layout) {
	if (!layout) return h("img", { src: URL.createObjectURL(new Blob([values[0]])), alt: `The picture in ${name}`, onload: (event) => URL.revokeObjectURL(event.target.src) });
	const canvas = h("canvas", { role: "img", "aria-label": `${name} as a picture of ${layout.width} by ${layout.height}` });
	drawTensor(values, datatype, layout, canvas);
	return canvas;
}

function valueTable({ name, datatype, shape, values }) {
	const width = shape.length > 1 ? shape.at(-1) : 1;
	const rows = values.length / width || 0;
	const columns = Math.min(width, COLUMNS);
	const left = width > 1 ? shape.slice(0, -1) : shape;
	const place = (row) => left.reduceRight(([rest, found], size) => [Math.floor(rest / size), [rest % size, ...found]], [row, []])[1].join(", ");
	const heads = Array.from({ length: columns }, (_, at) => (datatype === "BYTES" ? "" : "#") + (width > 1 ? at : "Value"));
	const cells = Array.from({ length: Math.min(rows, ROWS) }, (_, row) =>
		[h("span.soft", `[${place(row)}]`), ...heads.map((_, at) => text(values[row * width + at]))]);
	const part = rows > ROWS || width > columns ? `${cells.length} of ${rows} rows, ${columns} of ${width} columns` : "";
	return h("div", table(name, ["", ...heads], cells), h("p.hint", part));
}
