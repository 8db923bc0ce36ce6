/** Slow and failed requests of a version, and where the time of each went. */

import {h, s} from "../dom.js"
import {clock, duration, plural} from "../format.js"

const PARTS = ["queue", "gather", "compute", "scatter", "answer"]
const WIDTH = 1000

/** Requests that can be opened. `opened`: keys of those that are, kept by the caller. */
export function journeys({slow, failed, graph: ensemble}, opened, reasons) {
	return h("div", [["Failed", failed], ["Slowest of the last minutes", slow]].map(([title, list]) => list.length > 0 &&
		[h("h3", title), ...list.map(one => journey(one, opened, reasons, ensemble))]))
}

function journey(one, opened, reasons, ensemble) {
	const key = `${one.code} ${one.time} ${one.took_ns}`
	const node = h("details.journey", {open: opened.has(key) && "", ontoggle: () => opened[node.open ? "add" : "delete"](key)},
		h("summary", h("b", duration(one.took_ns / 1e9)), ` ${clock(one.time)} · ${plural(one.rows, "row")}`, one.id && ` · ${one.id}`, one.code && h("span.failing", ` · ${one.code}`)))
	const lanes = [[ensemble ? "ensemble" : one.instance || "no instance", 0, one],
		...one.steps.map(step => [`${step.model} ${step.version}`, step.begin_ns, step])]
	node.append(h("div", h("ul.lanes", {label: "Timeline"}, lanes.map(([name, begin, lane]) => laneOf(name, begin, lane, one.took_ns))),
		one.text && h("pre", one.text),
		one.batch_rows > 0 && h("p.hint", `In a batch of ${plural(one.batch_rows, "row")}, sent because ${reasons[one.reason] ?? one.reason}.`)))
	return node
}

function laneOf(name, begin, lane, whole) {
	const ends = [...lane.times, lane.took_ns]
	const parts = ends.map((end, at) => ({name: lane.times.length ? PARTS[at] : "total", from: ends[at - 1] ?? 0, end})).filter(({from, end}) => end > from)
	const text = parts.map(({name: part, from, end}) => `${part} ${duration((end - from) / 1e9)}`).join(", ")
	const x = ns => Math.min(WIDTH, (begin + ns) / whole * WIDTH)
	return h("li", h("span", name), s("svg", {viewBox: `0 0 ${WIDTH} 10`, preserveAspectRatio: "none", role: "img", "aria-label": `${name}: ${text}`},
		parts.map(({name: part, from, end}) => s(`rect.${part}`, {x: x(from), width: Math.max(2, x(end) - x(from)), height: 10}))), h("span.hint", text))
}
