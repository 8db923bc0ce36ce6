/** The servers together: curves, totals, and a row for each, with a link to its own page. */

import {chart} from "../charts.js"
import {facts, h, refill} from "../dom.js"
import {count, duration, rate, share} from "../format.js"
import {Grid} from "./grid.js"
import {loadCharts, nameCell, number, stateCell, trendCell} from "./overview.js"

const sorted = {id: "name"}
const mean = values => (values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : null)
const last = name => server => server.last(name)

const COLUMNS = [
	{id: "name", title: "Server", value: ({name}) => name, cell: nameCell},
	{id: "status", title: "State", value: ({state}) => state, cell: stateCell},
	number("requests", "Req/s", rate, last("requests")),
	{id: "trend", title: "1 min", value: last("requests"), cell: trendCell},
	number("p99", "p99", duration, last("p99")),
	number("wait", "Queue time", duration, last("wait")),
	number("queue", "Queue", count, last("queue")),
	number("running", "Run", count, last("running")),
	number("failed", "Fail/s", rate, last("failed")),
	number("listed", "Models", count, server => server.count(() => true)),
	number("failing", "Failing", count, server => server.count(({failing}) => failing)),
	number("memory", "Memory", share, ({live, store: {server}}) => (live ? server.machine_memory_used_bytes / server.machine_memory_bytes : null)),
	number("busy", "GPUs", share, ({live, store: {gpus}}) => (live ? mean(gpus.map(({utilization}) => utilization ?? 0)) : null)),
]

export function serversView(fleet) {
	const charts = [...loadCharts(), chart("Requests in the servers", count, ["queued", "accent", "queue"], ["running", "plain", "running"])]
	const totals = h("dl.facts")
	const problems = h("div.problems", {role: "status"})
	const grid = new Grid("server", COLUMNS, sorted, ({origin}) => (origin ? `${origin}/` : "#/"))

	function update() {
		const {servers, history} = fleet
		const [ready, all] = fleet.ready
		for (const one of charts) one.update(history)
		const sum = matches => servers.reduce((total, server) => total + (server.count(matches) ?? 0), 0)
		facts(totals, [["Ready", `${ready} of ${all}`], ["Requests per second", rate(history.last("requests", 1)[0])],
			["Failing models", count(sum(({failing}) => failing))], ["Versions", [...new Set(servers.map(({store}) => store.server.version))].filter(Boolean).sort().join(", ")]])
		refill(problems, servers.map(({name, reason}) => [name, reason]), () => servers.filter(({reason}) => reason)
			.map(({name, reason}) => h("p.problem", `${name}: ${reason}`)))
		grid.update(servers, "")
	}

	const stop = fleet.watch(update)
	update()
	return {
		nodes: [h("div.head", h("a.back", {href: "#/", label: "Overview"}, "←"), h("h1", {tabindex: -1}, "Servers")), h("div.charts", charts.map(({node}) => node)),
			totals, problems, grid.node],
		go() {
			document.body.dataset.view = "servers"
			document.title = "Servers – shmserve"
			grid.draw()
		},
		close() {
			stop()
			grid.stop.abort()
		},
	}
}
