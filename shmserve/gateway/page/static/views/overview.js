/** All models: curves, totals, and a table to sort and filter. */

import { chart, sparkline } from "../charts.js";
import { facts, h, set, write } from "../dom.js";
import { NOTHING, bytes, count, duration, plural, rate, share } from "../format.js";
import { route } from "../route.js";
import { Grid } from "./grid.js";

/** Kept while the page is open, so that "back" returns to the same rows. */
const kept = { words: "", group: "All", sorted: { id: "name", down: false }, scroll: 0 };

const GROUPS = {
	All: () => true,
	Serving: ({ row }) => row.state === "READY",
	Failing: ({ failing }) => failing,
	Busy: ({ rates, row }) => rates?.requests > 0 || row.queued > 0,
	"Not loaded": ({ state }) => state === "NOT LOADED",
};
const ORDER = ["UNAVAILABLE", "DEGRADED", "UNLOADING", "LOADING", "RELOADING", "READY", "NOT LOADED"];

function nameCell(node) {
	const name = h("span.text");
	const version = h("span.soft");
	node.append(name, version);
	return { node, update(entry) {
		write(name, entry.name);
		write(version, entry.version);
	} };
}

export function stateCell() {
	const node = h("span.state");
	return { node, update({ state, reason }) {
		write(node, state);
		set(node, "data-state", state);
		set(node, "title", reason || null);
	} };
}

function trendCell() {
	const { node, update } = sparkline();
	return { node, update: ({ history }) => update(history.last("requests", 60)) };
}

function number(id, title, hint, value, text) {
	const cell = () => {
		const node = h("span");
		return { node, update: (entry) => write(node, text(value(entry), entry)) };
	};
	return { id, title, hint, kind: "number", value, cell };
}

const requests = ({ rates }) => rates?.requests;
const COLUMNS = [
	{ id: "name", kind: "text", title: "Model", hint: "name and version", value: ({ name }) => name, cell: nameCell },
	{ id: "status", kind: "text", title: "State", hint: "whether it is served", value: ({ state }) => ORDER.indexOf(state), cell: stateCell },
	number("instances", "Inst.", "instances that are ready, of all", ({ ready, expected }) => (expected ? ready / expected : null),
		(value, { ready, expected }) => (expected ? `${ready}/${expected}` : NOTHING)),
	number("requests", "Req/s", "requests per second", requests, rate),
	{ id: "trend", kind: "text", title: "1 min", hint: "requests per second, last minute", value: requests, cell: trendCell },
	number("p50", "p50", "half of the requests took at most this long", ({ rates }) => rates?.p50, duration),
	number("p99", "p99", "99 % of the requests took at most this long", ({ rates }) => rates?.p99, duration),
	number("queue", "Queue", "requests that wait", ({ version, row }) => (version ? row.queued ?? 0 : null), count),
	number("running", "Run", "requests that are computed", ({ version, row }) => (version ? row.in_flight ?? 0 : null), count),
	number("batch", "Batch", "rows per batch", ({ rates }) => rates?.batch, rate),
	number("busy", "Busy", "share of the time in which its instances compute", ({ busy }) => busy, share),
	number("failed", "Fail/s", "failed requests per second", ({ rates }) => rates?.failed, rate),
	number("memory", "Memory", "resident memory of its processes", ({ memory }) => memory || null, bytes),
];

export function overview(store) {
	const charts = [
		[chart("Requests per second", rate, ["all", "accent"], ["failed", "bad"]), "requests", "failed"],
		[chart("Latency", duration, ["p99", "accent"], ["p50", "plain"]), "p99", "p50"],
		[chart("Requests in the server", count, ["queued", "accent"], ["running", "plain"]), "queue", "running"],
	];
	const totals = h("dl.facts", { "aria-label": "Server" });
	const grid = new Grid("Models", COLUMNS, kept.sorted, ({ name, version }) => route(name, version));
	const found = h("span.hint", { role: "status" });
	const search = h("input", { type: "search", placeholder: "Filter by name, state or reason", "aria-label": "Filter models",
		autocomplete: "off", spellcheck: "false", value: kept.words, oninput: () => {
			kept.words = search.value;
			list(true);
		} });
	const chips = Object.keys(GROUPS).map((group) => h("button.chip", { type: "button", onclick: () => {
		kept.group = group;
		list(true);
	} }, `${group} `, h("b")));

	function list(resort = false) {
		const words = kept.words.toLowerCase().split(/\s+/);
		const all = [...store.models.values()];
		const shown = all.filter(GROUPS[kept.group]).filter((entry) => {
			const text = `${entry.name} ${entry.version} ${entry.state} ${entry.reason}`.toLowerCase();
			return words.every((word) => text.includes(word));
		});
		Object.entries(GROUPS).forEach(([group, matches], at) => {
			const total = all.filter(matches).length;
			write(chips[at].lastChild, count(total));
			set(chips[at], "aria-pressed", `${group === kept.group}`);
			chips[at].classList.toggle("alarm", group === "Failing" && total > 0);
		});
		write(found, (shown.length < all.length ? `${count(shown.length)} of ` : "") + plural(all.length, "model"));
		grid.update(shown, !store.now ? "Connecting …" : all.length ? "No model matches." : "There are no models.", resort);
	}

	function update() {
		for (const [{ update: draw }, ...names] of charts) draw(names.map((name) => store.history.last(name)));
		if (store.now) facts(totals, serverFacts(store));
		list();
	}

	const stop = store.watch(update);
	update();
	return {
		nodes: [h("h1.unseen", { tabindex: -1 }, "Overview"), h("section.charts", { "aria-label": "Curves" }, charts.map(([{ node }]) => node)),
			totals, h("div.tools", search, h("div.chips", { role: "group", "aria-label": "Show" }, chips), found), grid.node],
		go() {
			document.body.dataset.view = "overview";
			document.title = "shmserve";
			window.scrollTo(0, kept.scroll);
			grid.draw();
		},
		close() {
			kept.scroll = window.scrollY;
			stop();
			grid.close();
		},
	};
}

function serverFacts({ server, gpus }) {
	const refused = Object.values(server.refused ?? {}).reduce((sum, one) => sum + one, 0);
	const part = (used, total) => `${bytes(used ?? 0)} of ${bytes(total)}`;
	return [["In flight", count(server.in_flight)], ["Clients", count(server.connections)], ["Held by clients", bytes(server.held_bytes)],
		["Shared memory", bytes(server.segment_bytes)], ["Broker", `${share(server.cpu)} · ${bytes(server.memory_bytes)}`],
		["Processors", `${share(server.machine_utilization)} of ${count(server.cores)}`],
		["Memory", part(server.machine_memory_used_bytes, server.machine_memory_bytes)], refused > 0 && ["Refused", count(refused)],
		...gpus.map((gpu, at) => [`GPU ${gpu.number ?? at}`, `${share(gpu.utilization ?? 0)} · ${part(gpu.memory_used_bytes, gpu.memory_bytes)}`])];
}
