/** A version of a model: what it does now, its configuration, and a form to try it. */

import {askToken, call, changes, history as recorded} from "../access.js"
import {bars, chart, curves} from "../charts.js"
import {button, codePanel, facts, h, panel, refill, set, show, table, write} from "../dom.js"
import {NOTHING, bytes, clock, count, duration, plural, rate, share} from "../format.js"
import {between} from "../rates.js"
import {modelPath, route} from "../route.js"
import {graph} from "./ensemble.js"
import {loadCharts, stateCell} from "./overview.js"

const REFETCH_MS = 1000
const JOURNEYS_MS = 5000
const REASONS = {
	full: "nothing more fits",
	preferred: "has a preferred size",
	delay: "the oldest request waited long enough",
	shape: "the next has other shapes",
	idle: "an instance was idle",
	alone: "retried, as its batch killed a worker",
	single: "the model takes one at a time",
}
const PARTS = {queue: "Queue", input: "Gather", infer: "Compute", output: "Scatter"}
const UNITS = {count, rate, share, duration, counts: values => Object.entries(values ?? {}).map(([reason, one]) => `${reason} ${count(one)}`).join(", ") || NOTHING}
const TABS = {"": "Live", try: "Try it", config: "Configuration", logs: "Log"}

export function modelView(store, {model, version}) {
	const state = stateCell()
	const versions = h("span.chips")
	const outcome = h("p", {role: "status"})
	const [load, unload] = ["load", "unload"].map(action => button("Unload", () => operate(action), {"data-action": action}))
	const problems = h("div")
	const live = livePart(store)
	const parts = {"": live.node, try: h("section"), config: h("section"), logs: h("section")}
	let log = null
	const body = h("div", {hidden: true})
	const tabs = Object.entries(TABS).map(([id, text]) => h("a", {href: route(model, version, id)}, text))
	body.append(h("nav.tabs", {label: "Views"}, tabs), ...Object.values(parts))
	let part = ""
	let detail = null
	let taken = 0
	let fetched = ""
	let tried = "" // what the form was made from
	let timer = 0
	let first = null

	function update() {
		const entry = store.find(model, version)
		const loaded = entry && !["NOT LOADED", "UNAVAILABLE"].includes(entry.state)
		document.body.dataset.view = part === "try" ? "try" : entry?.row.ensemble ? "ensemble" : "model"
		write(load, loaded ? "Reload" : "Load")
		show(load, entry)
		show(body, entry)
		show(unload, loaded)
		const all = store.versions(model).filter(one => one.version).map(({version, marks}) => ({version, marks}))
		refill(versions, [all, entry?.version, part], () => all.map(({version: one, marks}) =>
			h("a.chip", {href: route(model, one, part), "aria-current": one === entry?.version && "true"}, [`version ${one}`, ...marks].join(" · "))))
		refill(problems, [entry?.reason, entry?.row.last_failed_change, entry?.row.asleep, store.now > 0], () => problemsOf(entry, store.now > 0))
		if (!entry) return
		state.update(entry)
		first ??= entry.counters
		const since = between(first, entry.counters)
		live.update(entry, since?.answered ? since : between({}, entry.counters), since?.answered > 0, detail)
		refresh(entry)
	}

	function refresh({row, version: number, counters}) {
		const now = JSON.stringify([changes, row.state, row.loading_seconds, row.reloading, counters.failed, counters.rejected, row.ensemble && counters.success,
			counters.success > 0 && Math.floor(Date.now() / JOURNEYS_MS)])
		if (timer || now === fetched) return
		timer = setTimeout(() => (timer = 0), REFETCH_MS)
		fetched = now
		call("GET", modelPath("/page/model", model, number))
			.then(answer => answer.json()).catch(({message}) => ({error: message}))
			.then(report => now === fetched && take(report))
	}

	const missing = ({error = "The model is being loaded."}) => h("p.empty", error)

	function take(report) {
		const now = performance.now()
		report.graph?.steps.forEach((step, at) => {
			const more = step.count - detail?.graph?.steps[at]?.count
			step.rate = more >= 0 ? more * 1000 / (now - taken) : null
		})
		taken = now
		detail = report
		refill(parts.config, [report.text, report.error, report.warnings], () => (report.text ? [...report.warnings.map(text => h("p.problem.mild", text)),
			codePanel("Configuration as loaded", report.text, "config")] : missing(report)))
		fillForm()
	}

	/** The code of the form is loaded when it is first shown. */
	async function fillForm() {
		if (part !== "try" || !detail) return
		const report = detail
		const source = JSON.stringify([report.metadata, report.config, report.error])
		if (source === tried) return
		const {ways} = await import("../try/ways.js").catch(() => ({}))
		const make = report.metadata && await ways?.(report, version, store.server.ports, store.versions(model).length > 1)
		if (report !== detail) return
		tried = ways && source
		const failed = ways ? report : {error: "The form could not be loaded; reload the page."}
		parts.try.replaceChildren(...make ? make() : [missing(failed)])
	}

	/** The code of the log is loaded when it is first shown. */
	async function followLog() {
		const {logPart} = part === "logs" && await import("./logs.js").catch(() => false)
		if (logPart && !log) parts.logs.append((log = logPart(model)).node)
		log?.follow(part === "logs")
	}

	async function operate(action) {
		if (action === "unload" && !window.confirm(`Unload ${model}? New requests will be refused.`)) return
		set(outcome, "role", "status")
		write(outcome, `${action} …`)
		load.disabled = unload.disabled = true
		try {
			await call("POST", modelPath("/v2/repository/models", model, "", action), "{}")
			write(outcome, `${model} is ${action}ed.`)
		} catch (error) {
			set(outcome, "role", "alert")
			write(outcome, `Could not ${action} ${model}: ${error.message}`)
			if (error.status === 403) askToken(error.message)
		}
		load.disabled = unload.disabled = false
		fetched = ""
	}

	const stop = store.watch(update)
	return {
		nodes: [h("div.head", h("a.back", {href: "#/", label: "Overview"}, "←"), h("h1", {tabindex: -1}, model), versions, state.node,
			h("span.space"), load, unload), outcome, problems, body],
		go(place) {
			({part} = place)
			Object.keys(TABS).forEach((id, at) => {
				set(tabs[at], "aria-current", id === part && "page")
				show(parts[id], id === part)
			})
			document.title = `${model} – shmserve`
			update()
			fillForm()
			followLog()
		},
		close() {
			stop()
			part = ""
			log?.follow(false)
		},
	}
}

function problemsOf(entry, known) {
	if (!entry) return known && h("p.problem", {role: "alert"}, "The server does not list this model.")
	const {reason, asleep, changed_on_disk: changed, last_failed_change: failed} = entry.row
	return [reason && reason !== "unloaded" && h("p.problem", {role: "alert"}, reason),
		failed && h("p.problem", `The last change, at ${clock(failed.time)}, failed: ${failed.reason}`),
		asleep && h("p.problem.mild", "Asleep: it uses no memory, and the next request loads it again."),
		changed && h("p.problem.mild", "Changed on disk since it was loaded: reload it to serve the new files.")]
}

function livePart(store) {
	let seeded = null
	const opened = new Set() // requests whose timeline is open
	let timelines = null // their code, once there is one to show
	const time = curves([...loadCharts(), chart("Queue", count, ["requests", "accent", "queue"])], () => recorded(seeded.name, seeded.version))
	const tokens = [chart("Tokens per second", rate, ["generated", "accent", "generated_tokens_per_s"], ["prompts", "plain", "prompt_tokens_per_s"]),
		chart("First token", duration, ["p95", "accent", "first_token_p95"], ["p50", "plain", "first_token_p50"]),
		chart("Between tokens", duration, ["p95", "accent", "between_tokens_p95"], ["p50", "plain", "between_tokens_p50"])]
	const figures = h("dl.facts")
	const totals = h("dl.facts")
	const panels = {graph: ["Steps", "wide"], split: ["Where the time goes"], sizes: ["Batch sizes"], reasons: ["Why batches were sent"],
		journeys: ["Slow and failed requests", "wide"], errors: ["Last errors", "wide"], traffic: ["Versions", "wide"], instances: ["Instances", "wide"]}
	for (const [id, [title, kind]] of Object.entries(panels)) panels[id] = panel(title, kind, h("div"))

	function fill(id, hint, source, make) {
		const node = panels[id]
		show(node, source)
		write(node.firstChild.lastChild, hint)
		if (source) refill(node.lastChild, source, make)
	}

	async function fillRequests(detail) {
		const requests = detail?.slow && (detail.slow.length || detail.failed.length) && [detail.slow, detail.failed]
		if (requests) timelines ??= await import("./journeys.js").catch(() => null)
		fill("journeys", "open one for its timeline", timelines && requests, () => timelines.journeys(detail, opened, REASONS))
	}

	function update(entry, since, recent, detail) {
		const {counters: counted, row, instances, history} = entry
		if (entry !== seeded && entry.version) {
			seeded = entry
			recorded(entry.name, entry.version).then(({second, fine}) => history.seed(second, fine),
				({message}) => store.notify(`No history: ${message}`, entry, true))
		}
		time.update(history)
		for (const node of [figures, ...tokens.map(one => one.node)]) show(node, row.figures)
		if (row.figures) {
			for (const one of tokens) one.update(history)
			facts(figures, store.figures.map(({key, name, unit, help}) => [name, UNITS[unit](row.figures[key]), help]))
		}
		facts(totals, [["Requests", count((counted.success ?? 0) + (counted.failed ?? 0))], ["Failed", count(counted.failed ?? 0)],
			["Refused", count(counted.rejected ?? 0)], ["Largest batch", count(row.max_batch || null)],
			["Rows per batch", rate(since.batch)], ["Busy", share(entry.rates?.busy)], ["Memory", bytes(entry.memory || null)],
			row.scaled && ["Instances", `${entry.expected}, at least ${row.scaled[0]}, at most ${row.scaled[1]}`]])
		const hint = recent ? "since you opened this page" : "since it was loaded"
		const busy = entry.rates?.requests > 0
		fill("graph", "means and failures since a page was opened", detail?.graph && [detail.graph, busy], () => graph(detail.graph, busy))
		fill("split", hint, Object.keys(PARTS).map(id => since[id]), () => split(since))
		fill("sizes", hint, since.sizes, () => shares("Batch sizes", since.sizes, rows => ({label: plural(rows, "row")})))
		fill("reasons", hint, !row.ensemble && since.reasons, () => shares("Reasons", since.reasons, reason => ({label: `${reason}: ${REASONS[reason]}`})))
		fillRequests(detail)
		fill("errors", "", detail?.errors?.length && detail.errors, () => detail.errors.map(errorNode))
		const traffic = store.traffic(entry.name)
		const versions = store.versions(entry.name).map(({version, state}) => [version, state])
		fill("traffic", "shares of the requests that name no version", traffic && [traffic, versions], () => trafficTable(entry.name, traffic, versions))
		fill("instances", `${entry.ready} of ${entry.expected} ready`, instances.length && instances, () => instanceTable(instances))
	}
	return {node: h("section", time.node, h("div.charts", tokens.map(({node}) => node)), figures, totals, h("div.panels", Object.values(panels))), update}
}

function split(since) {
	const parts = Object.entries(PARTS).map(([id, label]) => ({label, value: since[id], text: duration(since[id])}))
	const total = parts.reduce((sum, {value}) => sum + value, 0)
	return bars("Time", total ? parts.map(one => ({...one, value: one.value / total})) : [])
}

function shares(title, counts, about) {
	const total = Object.values(counts).reduce((sum, one) => sum + one, 0)
	return bars(title, Object.entries(counts).map(([key, one]) => ({value: one / total, text: share(one / total), ...about(key)})))
}

function errorNode({time, code, count: times = 1, text}) {
	return h("div.error", h("p.hint", `${clock(time)} · ${code}${times > 1 ? ` · ${count(times)} times` : ""}`),
		h("pre", text || "Reading the text needs a token with the role operate."))
}

function trafficTable(model, {now, shares, aliases, shadow, compared}, versions) {
	const states = Object.fromEntries(versions)
	const all = new Set([...Object.keys(states), ...Object.keys(shares), ...Object.values(aliases).map(String), ...Object.keys(shadow)])
	const percent = value => (value == null ? NOTHING : `${value} %`)
	const rows = [...all].sort((one, other) => one - other).map(version => {
		const state = states[version] ?? "NOT LOADED"
		return [states[version] ? h("a", {href: route(model, version)}, version) : version, h("span.state", {"data-state": state}, state), percent(now[version]),
			percent(shares[version]), percent(shadow[version]), Object.keys(aliases).filter(alias => `${aliases[alias]}` === version).map(alias => `${model}@${alias}`).join(" ")]
	})
	return [table("Versions", ["Version", "State", "#Share now", "#Share set", "#As a shadow", "Aliases"], rows), ...compared.map(one =>
		h("p", {"data-alarm": one.different + one.failed > 0}, `Shadow ${one.shadow} compared with version ${one.version}: ${count(one.equal)} equal, `
			+ `${count(one.different)} different, ${count(one.failed)} failed, ${count(one.skipped)} skipped`))]
}

function instanceTable(all) {
	const rows = number => (number ? plural(number, "row") : NOTHING)
	const heads = ["Instance", "State", "Device", "#Busy since", "#Batch", "#Next", "#Memory", "#Restarts", "#Process", "Note"]
	return table("Instances", heads, all.map(one => {
		const state = one.state === "ready" ? (one.quarantined && "quarantined") || (one.passive && "passive") || "ready" : one.state
		return [one.name, h("span.state", {"data-state": state}, state), one.kind === "KIND_GPU" ? `GPU ${one.device ?? 0}` : "CPU",
			one.batch_rows ? duration(one.batch_seconds ?? 0) : NOTHING, rows(one.batch_rows), rows(one.waiting_rows), bytes(one.memory_bytes),
			count(one.restarts ?? 0), `${one.pid ?? NOTHING}`,
			[one.reason, one.retry_seconds && `next attempt in ${duration(one.retry_seconds)}`].filter(Boolean).join("; ")]
	}))
}
