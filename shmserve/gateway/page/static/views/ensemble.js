/** The steps of an ensemble as a graph from left to right, with the times at which tensors exist on its edges. */

import { h, s, table } from "../dom.js";
import { duration } from "../format.js";
import { route } from "../route.js";

const WIDTH = 190;
const GAP = 130;
const PORT = 36;
const HEAD = 54;
const SPACE = 22;

const mean = (step, ...parts) => (step?.count ? parts.reduce((sum, part) => sum + (step[part] ?? 0), 0) / step.count / 1e9 : null);
const waits = (step) => mean(step, "queue_ns");
const runs = (step) => mean(step, "input_ns", "infer_ns", "output_ns");
const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** {boxes, edges, width, height}. A box without `step` is the request, the response, or a place in which an edge passes
 * other boxes (without `name`). `ready`: mean seconds from the request to the box's outputs, along the slowest way. */
function layout({ steps, inputs, outputs }) {
	const source = { name: "Request", reads: [], writes: inputs, column: 0, ready: 0 };
	const boxes = steps.map((step) => ({ step, name: step.model, reads: Object.values(step.inputs), writes: Object.values(step.outputs), column: 1 }));
	const writer = new Map([source, ...boxes].flatMap((box) => box.writes.map((tensor) => [tensor, box])));
	const from = (box) => [...new Set(box.reads)].map((tensor) => writer.get(tensor)).filter(Boolean);
	for (const _ of boxes) for (const box of boxes) box.column = Math.max(1, ...from(box).map(({ column }) => column + 1));
	boxes.sort((one, other) => one.column - other.column);
	for (const box of boxes) box.ready = Math.max(0, ...from(box).map(({ ready }) => ready)) + waits(box.step) + runs(box.step);
	const sink = { name: "Response", reads: outputs, writes: [], column: Math.max(0, ...boxes.map(({ column }) => column)) + 1 };
	const all = [source, ...boxes, sink];
	const edges = all.flatMap((to) => to.reads.filter((tensor) => writer.has(tensor)).map((tensor) => {
		const edge = { tensor, from: writer.get(tensor), to, via: [] };
		for (let column = edge.from.column + 1; column < to.column; column += 1) edge.via.push({ column, reads: [], writes: [] });
		return edge;
	}));
	const placed = [...all, ...edges.flatMap(({ via }) => via)];
	const columns = Array.from({ length: sink.column + 1 }, (_, column) => placed.filter((box) => box.column === column));
	for (const box of placed) box.height = box.name ? HEAD + Math.max(box.reads.length, box.writes.length, 1) * PORT : 10;
	const tall = columns.map((column) => column.reduce((sum, { height }) => sum + height + SPACE, -SPACE));
	const height = Math.max(...tall);
	columns.forEach((column, at) => {
		let y = (height - tall[at]) / 2;
		for (const box of column) {
			Object.assign(box, { x: at * (WIDTH + GAP), y });
			y += box.height + SPACE;
		}
	});
	return { boxes: all, edges, width: columns.length * (WIDTH + GAP) - GAP, height };
}

function drawEdge({ tensor, from, to, via }) {
	const port = (box, at) => box.y + HEAD + at * PORT;
	const start = [from.x + WIDTH, port(from, from.writes.indexOf(tensor))];
	const points = [start, ...via.flatMap(({ x, y }) => [[x, y + 5], [x + WIDTH, y + 5]]), [to.x, port(to, to.reads.indexOf(tensor))]];
	const path = points.map(([x, y], at) => {
		const [before, level] = points[at - 1] ?? [];
		return at % 2 ? `C${before + GAP / 2} ${level} ${x - GAP / 2} ${y} ${x} ${y}` : `${at ? "L" : "M"}${x} ${y}`;
	});
	const time = from.step?.count ? duration(from.ready) : "";
	const about = `${tensor}: ${from.step ? `written by ${from.name} ${time && `${time} after the request`}` : "in the request"}` +
		`${to.step?.count ? `; waits ${duration(waits(to.step))} for ${to.name}` : ""}`;
	return s("g.edge", { "data-tensor": tensor }, s("title", about), s("path", { d: path.join("") }),
		s("text", { x: start[0] + 8, y: start[1] - 5 }, cut(tensor, 18)), s("text.time", { x: start[0] + 8, y: start[1] + 14 }, time));
}

function drawBox({ step, name, x, y, height }, slowest) {
	const time = step?.count ? `waits ${duration(waits(step))}, runs ${duration(runs(step))}` : "";
	const node = s(step ? "g" : "g.end", { "data-step": step?.index }, s("rect", { x, y, width: WIDTH, height, rx: 8 }),
		s("text.name", { x: x + 12, y: y + 22 }, cut(name, 23)), step && [s("text", { x: x + 12, y: y + 40 }, time),
			s("rect.load", { x: x + 12, y: y + height - 12, height: 4, rx: 2, width: (WIDTH - 24) * (runs(step) / slowest || 0) })]);
	return step ? s("a", { href: route(step.model, step.version), "aria-label": `${name}: ${time}` }, node) : node;
}

/** `document`: the graph of /page/model. */
export function graph(document) {
	const { boxes, edges, width, height } = layout(document);
	const slowest = Math.max(...boxes.map(({ step }) => runs(step) ?? 0));
	return [h("div.scroll", s("svg", { "data-graph": "", width: width + 2, height: height + 2, viewBox: `-1 -1 ${width + 2} ${height + 2}`,
		role: "group", "aria-label": "Graph of the ensemble" }, edges.map(drawEdge), boxes.map((box) => drawBox(box, slowest)))),
	table("Steps", ["Step", "Writes", "#Runs", "#Waits", "#Gather", "#Compute", "#Scatter"], document.steps.map((step) => [
		h("a", { href: route(step.model, step.version) }, step.model), Object.values(step.outputs).join(", "), `${step.count ?? 0}`,
		...["queue_ns", "input_ns", "infer_ns", "output_ns"].map((part) => duration(mean(step, part)))]))];
}
