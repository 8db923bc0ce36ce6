/** All models: curves, totals, and a table to sort and filter. */

import {history} from "../access.js"
import {chart, curves, sparkline} from "../charts.js"
import {facts, h, refill, set, show, write} from "../dom.js"
import {NOTHING, bytes, clock, count, duration, plural, rate, share} from "../format.js"
import {route} from "../route.js"
import {Grid} from "./grid.js"

const TREND_S = 60

/** So that "back" returns to the same rows. */
const kept = {words: "", group: "All", sorted: {id: "name"}, scroll: 0}
const GROUPS = {
	All: () => true,
	Failing: ({failing}) => failing,
	Busy: ({rates}) => rates?.requests > 0,
	Asleep: ({row}) => row.asleep,
}

export function stateCell() {
	const node = h("span.state")
	return {node, update({state, reason}) {
		write(node, state)
		set(node, "data-state", state)
		set(node, "title", reason)
	}}
}

export function nameCell(node) {
	const name = h("span.text")
	const version = h("span.soft.number")
	const marks = h("span.soft.text.marks")
	node.append(name, version, marks)
	return {node, update(entry) {
		write(name, entry.name)
		write(version, entry.version)
		write(marks, entry.marks.join(" · "))
		set(marks, "title", entry.marks.join(" · "))
	}}
}

export function trendCell() {
	const {node, update} = sparkline("accent", "bad")
	return {node, update: ({history}) => update(history.last("requests", TREND_S), history.last("failed", TREND_S))}
}

export function number(id, title, text, value) {
	const get = value ?? (({rates}) => rates?.[id])
	const cell = () => {
		const node = h("span")
		return {node, update(entry) {
			const current = get(entry)
			write(node, text(current, entry))
			set(node, "data-alarm", /^fail/.test(id) && current > 0)
		}}
	}
	return {id, title, kind: "number", value: get, cell}
}

/** The charts that all views have. */
export const loadCharts = () => [chart("Requests per second", rate, ["all", "accent", "requests"], ["failed", "bad", "failed"]),
	chart("Latency", duration, ["p99", "accent", "p99"], ["p50", "plain", "p50"])]

const COLUMNS = [
	{id: "name", title: "Model", value: ({name}) => name, cell: nameCell},
	{id: "status", title: "State", value: ({state}) => state, cell: stateCell},
	number("instances", "Inst.", (value, {ready, expected, bounds}) => (expected ? `${ready}/${expected}${bounds && ` (${bounds})`}` : NOTHING),
		({ready, expected}) => ready / expected),
	number("requests", "Req/s", rate),
	{id: "trend", title: "1 min", value: ({rates}) => rates?.requests, cell: trendCell},
	number("p50", "p50", duration),
	number("p99", "p99", duration),
	number("queue", "Queue", count, ({version, row}) => (version ? row.queued ?? 0 : null)),
	number("running", "Run", count, ({version, row}) => (version ? row.in_flight ?? 0 : null)),
	number("batch", "Batch", rate),
	number("busy", "Busy", share),
	number("failed", "Fail/s", rate),
	number("memory", "Memory", bytes, ({memory}) => memory || null),
]

export function overview(store) {
	const time = curves([...loadCharts(), chart("Requests in the server", count, ["queued", "accent", "queue"], ["running", "plain", "running"])], history)
	const totals = h("dl.facts")
	const events = h("ol.events", {tabindex: 0, label: "Events"})
	const happened = h("section.panel", h("h2", "Events"), events)
	const grid = new Grid("model", COLUMNS, kept.sorted, ({name, version}) => route(name, version))
	const matching = h("span.hint", {role: "status"})
	const search = h("input", {type: "search", placeholder: "Filter by name, alias, state or reason", label: "Filter models", autocomplete: "off",
		value: kept.words, oninput: () => list("words", search.value)})
	const chips = Object.keys(GROUPS).map(group => h("button.chip", {onclick: () => list("group", group)}, `${group} `, h("b")))

	function list(name, value) {
		if (name) kept[name] = value
		const words = kept.words.toLowerCase().split(/\s+/)
		const all = [...store.models.values()]
		const shown = all.filter(GROUPS[kept.group]).filter(entry =>
			words.every(word => `${entry.name} ${entry.version} ${entry.marks} ${entry.state} ${entry.reason}`.toLowerCase().includes(word)))
		chips.forEach((chip, at) => {
			const [group, matches] = Object.entries(GROUPS)[at]
			const total = all.filter(matches).length
			write(chip.lastChild, count(total))
			set(chip, "aria-pressed", `${group === kept.group}`)
			chip.classList.toggle("alarm", group === "Failing" && total > 0)
		})
		write(matching, `${count(shown.length)} of ${plural(all.length, "model")}`)
		grid.update(shown, store.now ? "No model matches." : "Connecting …", name)
	}

	function update() {
		time.update(store.history)
		if (store.now) facts(totals, serverFacts(store))
		show(happened, store.events.length)
		refill(events, store.events.at(-1), () => store.events.toReversed().map(eventItem))
		list()
	}

	const stop = store.watch(update)
	update()
	return {
		nodes: [h("h1.unseen", {tabindex: -1}, "Overview"), time.node, happened, totals,
			h("div.tools", search, h("div.chips", {role: "group", label: "Show"}, chips), matching), grid.node],
		go() {
			document.body.dataset.view = "overview"
			document.title = "shmserve"
			window.scrollTo(0, kept.scroll)
			grid.draw()
		},
		close() {
			kept.scroll = window.scrollY
			stop()
			grid.stop.abort()
		},
	}
}

function eventItem({time, text, bad, model, version}) {
	return h("li", {"data-alarm": bad}, h("span.hint", clock(time)), " ", model && h("a", {href: route(model, version)}, `${model} ${version}`), ` ${text}`)
}

function gpuFact(gpu, part) {
	const clock = gpu.throttled?.length ? [`throttled: ${gpu.throttled.join(", ")}`] : []
	const busy = gpu.utilization == null ? [] : [share(gpu.utilization)]
	return [...busy, part(gpu.memory_used_bytes, gpu.memory_bytes), ...clock, ...(gpu.out_of_service ? ["out of service"] : [])].join(" · ")
}

function serverFacts({server, gpus}) {
	const part = (used, total) => `${bytes(used ?? 0)} of ${bytes(total)}`
	return [["In flight", count(server.in_flight)], ["Clients", count(server.connections)],
		["Shared memory", bytes(server.segment_bytes)], ["Broker", `${share(server.cpu)} · ${bytes(server.memory_bytes)}`],
		["Processors", `${share(server.machine_utilization)} of ${server.cores}`],
		["Memory", part(server.machine_memory_used_bytes, server.machine_memory_bytes)],
		...gpus.map((gpu, at) => [`GPU ${gpu.number ?? at}`, gpuFact(gpu, part)])]
}
