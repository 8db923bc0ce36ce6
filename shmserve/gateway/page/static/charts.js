/** Curves and bars. Invariant: what they show is available as text, too. */

import {h, s, set, write} from "./dom.js"

const WIDTH = 300
const HEIGHT = 100
const FRAME = {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none"}

function path(values, top, slots, closed) {
	const x = at => ((slots - values.length + at) * WIDTH / (slots - 1)).toFixed(1)
	let text = ""
	let start = ""
	const end = () => (start && closed ? `V${HEIGHT}H${start}Z` : "")
	values.forEach((value, at) => {
		if (Number.isNaN(value)) {
			text += end()
			start = ""
		} else {
			const point = `${x(at)} ${(HEIGHT - 1 - value / top * (HEIGHT - 2)).toFixed(1)}`
			const lone = !start && !(values[at + 1] <= top)
			text += start ? `L${point}` : `M${point}h${lone ? 1.5 : .1}`
			start ||= x(at)
		}
	})
	return text + end()
}

/** The smallest of 1, 2, 5, 10, 20 and so on that is not below the value. */
function ceiling(value) {
	const power = 10 ** Math.floor(Math.log10(value || 1))
	return [1, 2, 5, 10].map(step => step * power).find(edge => edge >= value * 0.999999)
}

const highest = values => values.reduce((top, value) => (value > top ? value : top), 0)

/** Curves without axes, one for each class, all with the same scale. */
export function sparkline(...kinds) {
	const lines = kinds.map(kind => s(`path.line.${kind}`))
	const node = s("svg.spark", {...FRAME, "aria-hidden": "true"}, lines.toReversed())
	return {node, update(...series) {
		const top = Math.max(...series.map(highest)) || 1
		series.forEach((values, at) => set(lines[at], "d", path(values, top, values.length)))
	}}
}

const RECENT = {text: "5 min", about: "last 5 minutes"}
const HOUR = {text: "1 hour", about: "last hour"}
const STEP_S = 10

/** A chart: {node, update(history, span)}. `series`: [title, class, name in the history] each, of which the first is filled,
 * and above the others. */
export function chart(title, text, ...series) {
	const lines = series.map(([, kind]) => s(`path.line.${kind}`))
	const area = s("path.area")
	const picture = s("svg", {...FRAME, role: "img"}, s("path.rules", {d: "M0 1H300M0 34H300M0 67H300"}), area, lines.toReversed())
	const scale = h("span.top")
	const values = series.map(() => h("b"))
	const keys = h("p.keys", series.map(([name, kind], at) => h(`span.${kind}`, h("i"), `${name} `, values[at])))
	const since = h("span")
	function update(history, {text: ago, about} = RECENT) {
		const data = series.map(([, , name]) => history.last(name))
		const tops = data.map(highest)
		const top = ceiling(Math.max(...tops))
		data.forEach((one, at) => {
			set(lines[at], "d", path(one, top, one.length))
			write(values[at], text(one.at(-1)))
		})
		set(area, "d", path(data[0], top, data[0].length, true))
		write(scale, Math.max(...tops) ? text(top).replace(/\.0+\b/, "") : "")
		const parts = series.map(([name], at) => ` ${name} ${values[at].textContent}, at most ${text(tops[at])}`)
		set(picture, "aria-label", `${title}, ${about}:${parts.join(";")}`)
		write(since, `${ago} ago`)
	}
	return {node: h("figure.panel", h("b", title), keys, h("div.plot", scale, picture), h("div.axis", since, h("span", "now"))), update}
}

/** Charts, and the choice of how long a time they show. `recorded()`: a promise of what the server has recorded. */
export function curves(charts, recorded) {
	let [hour, loaded] = [null, -Infinity]
	let shown = RECENT
	let latest = null
	const chips = [RECENT, HOUR].map(span => h("button.chip", {onclick: () => {
		shown = span
		draw()
	}}, span.text))

	function draw() {
		chips.forEach((chip, at) => set(chip, "aria-pressed", `${shown === [RECENT, HOUR][at]}`))
		if (!latest) return
		const stale = shown === HOUR && latest.second - loaded >= STEP_S
		if (stale) {
			loaded = latest.second
			recorded().then(({coarse}) => {
				hour = {last: name => (coarse[name] ?? []).map(value => value ?? NaN)}
				draw()
			})
		}
		if (shown === HOUR && !hour) return
		for (const one of charts) one.update(shown === HOUR ? hour : latest, shown)
	}

	return {
		node: h("div", h("div.chips.spans", {role: "group", label: "Time shown"}, chips), h("div.charts", charts.map(({node}) => node))),
		update(history) {
			latest = history
			draw()
		},
	}
}

export function bars(label, rows) {
	if (!rows.length) return h("p.empty", "No requests yet")
	return h("ul.bars", {label}, rows.map(row => h("li", {title: row.title}, h("span.label", row.label),
		h("meter", {value: row.value, label: row.label}), h("span.value", row.text))))
}
