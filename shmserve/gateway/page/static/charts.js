/** Curves, as SVG that the style sheet colours. Invariant: what a curve shows is available as text, too. */

import { h, s, set, write } from "./dom.js";
import { NOTHING, duration } from "./format.js";

const WIDTH = 300;
const HEIGHT = 100;
const SLOTS = 300;
const FRAME = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" };

/** The path of a curve that ends at the right edge; a value that is missing is a gap. */
function path(values, top, slots, closed = false) {
	const x = (at) => ((slots - values.length + at) * WIDTH / (slots - 1)).toFixed(1);
	let text = "";
	let start = "";
	values.forEach((value, at) => {
		const missing = Number.isNaN(value);
		if (missing && start && closed) text += `V${HEIGHT}H${start}Z`;
		if (missing) return void (start = "");
		const point = `${x(at)} ${(HEIGHT - Math.min(1, value / top) * (HEIGHT - 2) - 1).toFixed(1)}`;
		text += start ? `L${point}` : `M${point}h.1`;
		start ||= x(at);
	});
	return text + (start && closed ? `V${HEIGHT}H${start}Z` : "");
}

/** The least of 1, 2, 5, 10, 20 and so on that is not below the value. */
function ceiling(value) {
	const power = 10 ** Math.floor(Math.log10(value || 1));
	return [1, 2, 5, 10].map((step) => step * power).find((edge) => edge >= value * 0.999999);
}

const highest = (values) => values.reduce((most, value) => (value > most ? value : most), 0);

/** A small curve: {node, update(values)}. */
export function sparkline(slots = 60) {
	const line = s("path.line.accent");
	const node = s("svg.spark", { ...FRAME, "aria-hidden": "true" }, line);
	return { node, update: (values) => set(line, "d", path(values, highest(values) || 1, slots)) };
}

/** A chart of the last five minutes: {node, update(lists of values)}. `series`: [name, class] each, of which the first
 * is filled. The pointer and the arrow keys read single values. */
export function chart(title, text, ...series) {
	const lines = series.map(([, kind]) => s(`path.line.${kind}`));
	const area = s("path.area");
	const cross = s("path.cross");
	const picture = s("svg", { ...FRAME, tabindex: 0, role: "img", onpointermove: hover, onpointerleave: () => choose(null),
		onblur: () => choose(null), onkeydown: key }, s("path.rules", { d: "M0 25H300M0 50H300M0 75H300" }), area, lines, cross);
	const scale = h("span.top");
	const values = series.map(() => h("b"));
	const keys = series.map(([name, kind], at) => h(`span.${kind}`, h("i"), `${name} `, values[at]));
	const when = h("span");
	const spoken = h("span.unseen", { "aria-live": "polite" });
	const node = h("figure.panel", h("figcaption", h("b", title), h("span.keys", keys)), h("div.plot", scale, picture),
		h("div.axis", h("span", "5 min ago"), when, h("span", "now")), spoken);
	let data = series.map(() => []);
	let back = null;

	function choose(slots) {
		back = slots;
		draw();
	}
	function hover(event) {
		const box = picture.getBoundingClientRect();
		choose(Math.round((box.right - event.clientX) / box.width * (SLOTS - 1)));
	}
	function key(event) {
		const step = { ArrowLeft: 1, ArrowRight: -1, PageUp: 30, PageDown: -30 }[event.key];
		if (!step) return;
		event.preventDefault();
		choose(Math.max(0, Math.min(data[0].length - 1, (back ?? -1) + step)));
		write(spoken, `${when.textContent}: ${keys.map((one) => one.textContent).join(", ")}`);
	}
	function draw() {
		const top = ceiling(Math.max(...data.map(highest)));
		lines.forEach((line, at) => set(line, "d", path(data[at], top, SLOTS)));
		set(area, "d", path(data[0], top, SLOTS, true));
		write(scale, text(top));
		values.forEach((value, at) => write(value, text(data[at].at(-1 - (back ?? 0)))));
		write(when, back ? `${duration(back)} ago` : "");
		set(cross, "d", back === null ? null : `M${(SLOTS - 1 - back) * WIDTH / (SLOTS - 1)} 0V${HEIGHT}`);
	}
	function update(lists) {
		data = lists;
		draw();
		if (document.activeElement === picture) return;
		const parts = series.map(([name], at) => `${name} now ${text(data[at].at(-1))}, at most ${text(highest(data[at]))}`);
		set(picture, "aria-label", `${title}, last 5 minutes: ${parts.join("; ")}`);
	}
	return { node, update };
}

/** Bars as a list. `rows`: {label, value, text, title}; the value is a share of 1. */
export function bars(label, rows) {
	if (!rows.length) return h("p.empty", NOTHING);
	return h("ul.bars", { "aria-label": label }, rows.map((row) => h("li", { title: row.title }, h("span.label", row.label),
		h("meter", { value: Math.max(0, Math.min(1, row.value)), "aria-label": row.label }), h("span.value", row.text))));
}
