/** One version of a model: what it does now, its configuration, and a form to try it. */

import { askToken, call } from "../access.js";
import { bars, chart } from "../charts.js";
import { button, codePanel, facts, h, refill, set, show, table, write } from "../dom.js";
import { NOTHING, bytes, clock, count, duration, plural, rate, share } from "../format.js";
import { route } from "../route.js";
import { tryForm } from "../try/form.js";
import { graph } from "./ensemble.js";
import { stateCell } from "./overview.js";

const REFETCH_MS = 2000;
const REASONS = {
	full: "no further request fits",
	preferred: "it has a preferred size",
	delay: "the oldest request has waited for the maximum delay",
	shape: "the next request has other shapes",
	idle: "an instance was idle",
	alone: "retried alone, as its batch killed a worker",
	single: "the model takes one request at a time",
};
const PARTS = { queue: "Queue", input: "Gather", infer: "Compute", output: "Scatter" };
const TABS = { "": "Live", try: "Try it", config: "Configuration" };

export function modelView(store, { model, version }) {
	const state = stateCell();
	const versions = h("span.chips");
	const outcome = h("p", { role: "status" });
	const load = button("Load", () => operate("load"), { "data-action": "load" });
	const unload = button("Unload", () => operate("unload"), { "data-action": "unload" });
	const problems = h("div");
	const live = livePart();
	const parts = { "": live.node, try: h("section", { "aria-label": "Try it" }), config: h("section", { "aria-label": "Configuration" }) };
	const tabs = Object.entries(TABS).map(([id, text]) => h("a", { href: route(model, version, id) }, text));
	let part = "";
	let detail = null;
	let fetched = "";
	let timer = 0;
	let closed = false;
	let asked = false;

	function update() {
		const entry = store.find(model, version);
		const loaded = entry && !["NOT LOADED", "UNAVAILABLE"].includes(entry.state);
		document.body.dataset.view = part === "try" ? "try" : entry?.row.ensemble ? "ensemble" : "model";
		write(load, loaded ? "Reload" : "Load");
		show(unload, loaded);
		show(load, entry);
		if (!asked) write(unload, "Unload");
		const others = store.versions(model).filter((one) => one.version);
		refill(versions, [others.map((one) => one.version), entry?.version, part], () => others.map((one) =>
			h("a.chip", { href: route(model, one.version, part), "aria-current": one === entry && "true" }, `version ${one.version}`)));
		refill(problems, [entry?.reason, entry?.row.last_failed_change, store.now > 0], () => problemsOf(entry, store));
		if (!entry) return;
		state.update(entry);
		live.update(entry, store.now, detail);
		refresh(entry);
	}

	/** Fetches what is not in the stream: first, and after changes that concern it, at most every two seconds. */
	function refresh({ row, version: number, counters }) {
		const now = JSON.stringify([row.state, row.loading_seconds, row.reloading, row.changed_on_disk, counters.failed, counters.rejected,
			row.ensemble && counters.success]);
		if (timer || now === fetched) return;
		timer = setTimeout(() => (timer = 0), REFETCH_MS);
		fetched = now;
		call("GET", `/page/model/${encodeURIComponent(model)}${number && `/versions/${number}`}`)
			.then((answer) => answer.json()).then(take, (error) => take({ error: error.message }));
	}

	function take(found) {
		if (closed) return;
		detail = found;
		const { metadata, config, text, error = "The model is being loaded." } = found;
		const missing = () => h("p.empty", error);
		refill(parts.try, [metadata, config, error], () => (metadata ? tryForm(found, version) : missing()));
		refill(parts.config, [metadata, text, error], () => (config ? configuration(found) : missing()));
		update();
	}

	async function operate(action) {
		if (action === "unload" && !asked) { // a second press confirms
			asked = true;
			write(unload, "Really unload?");
			return void setTimeout(() => (asked = false), 5000);
		}
		asked = false;
		set(outcome, "role", "status");
		write(outcome, action === "load" ? "Loading …" : "Unloading …");
		load.disabled = unload.disabled = true;
		try {
			await call("POST", `/v2/repository/models/${encodeURIComponent(model)}/${action}`, "{}", { "Content-Type": "application/json" });
			write(outcome, `${model} is ${action}ed.`);
		} catch (error) {
			set(outcome, "role", "alert");
			write(outcome, `Could not ${action} ${model}: ${error.message}`);
			if (error.status === 403) askToken(error.message);
		}
		load.disabled = unload.disabled = false;
		fetched = "";
	}

	const stop = store.watch(update);
	return {
		nodes: [h("div.head", h("a.back", { href: "#/", "aria-label": "Overview" }, "←"), h("h1", { tabindex: -1 }, model), versions, state.node,
			h("span.space"), load, unload), outcome, problems, h("nav.tabs", { "aria-label": "Views of the model" }, tabs), Object.values(parts)],
		go(place) {
			({ part } = place);
			Object.keys(TABS).forEach((id, at) => {
				set(tabs[at], "aria-current", id === part && "page");
				show(parts[id], id === part);
			});
			document.title = `${model} – shmserve`;
			update();
		},
		close() {
			closed = true;
			stop();
		},
	};
}

function problemsOf(entry, store) {
	if (!entry) return store.now > 0 && h("p.problem", { role: "alert" }, "The server does not list this model.");
	const { reason, changed_on_disk: changed, last_failed_change: failed } = entry.row;
	return [reason && reason !== "unloaded" && h("p.problem", { role: "alert" }, reason),
		failed && h("p.problem", `The last change, at ${clock(failed.time)}, failed: ${failed.reason}`),
		changed && h("p.problem.mild", "Changed on disk since it was loaded. Reload it to serve the new files.")];
}

function livePart() {
	const charts = [[chart("Requests per second", rate, ["all", "accent"]), "requests"],
		[chart("Latency", duration, ["p99", "accent"], ["p50", "plain"]), "p99", "p50"], [chart("Queue", count, ["requests", "accent"]), "queue"]];
	const totals = h("dl.facts", { "aria-label": "Totals" });
	const panels = {};
	for (const [id, title, kind] of [["graph", "Steps", "wide"], ["split", "Where the time goes"], ["sizes", "Batch sizes"],
		["reasons", "Why batches were sent"], ["errors", "Last errors", "wide"], ["instances", "Instances", "wide"]]) {
		const panel = (panels[id] = { hint: h("span.hint"), body: h("div") });
		panel.node = h(`section.panel.${kind}`, h("h2", `${title} `, panel.hint), panel.body);
	}

	/** Shows a panel, or hides it if there is nothing to show. */
	function fill(id, hint, source, make) {
		show(panels[id].node, source);
		write(panels[id].hint, hint);
		if (source) refill(panels[id].body, source, make);
	}

	function update(entry, now, detail) {
		const { counters, row, instances } = entry;
		const lately = entry.lately(now);
		for (const [{ update: draw }, ...names] of charts) draw(names.map((name) => entry.history.last(name)));
		facts(totals, [["Requests", count((counters.success ?? 0) + (counters.failed ?? 0))],
			...[["Failed", "failed"], ["Refused", "rejected"], ["Cancelled", "cancelled"]].map(([title, name]) => [title, count(counters[name] ?? 0)]),
			["Largest batch", count(row.max_batch ?? 0)], ["Rows per batch", rate(lately?.batch)], ["Busy", share(entry.busy)],
			["Memory", bytes(entry.memory || null)], row.sequences && ["Sequences", count(row.sequences)],
			lately?.cache != null && ["From the cache", share(lately.cache)], ["Loaded in", duration(row.loading_seconds)]]);
		const when = lately ? `last ${Math.round(lately.seconds)} s` : "";
		const sizes = shares(lately?.sizes);
		const reasons = shares(lately?.reasons);
		fill("graph", "means since this page was opened", detail?.graph, () => graph(detail.graph));
		fill("split", `mean, ${when}`, Object.keys(PARTS).map((id) => lately?.[id]), () => split(lately));
		fill("sizes", when, sizes, () => bars("Batch sizes", sizes.map((one) => ({ ...one, label: plural(Number(one.key), "row") }))));
		fill("reasons", when, reasons, () => bars("Reasons", reasons.map((one) => ({ ...one, label: one.key, title: REASONS[one.key] }))));
		fill("errors", "", detail?.errors?.length && detail.errors, () => detail.errors.map(errorNode));
		fill("instances", `${entry.ready} of ${entry.expected} ready`, instances.length && instances, () => instanceTable(instances));
	}
	return { node: h("section", { "aria-label": "Live" }, h("div.charts", charts.map(([{ node }]) => node)), totals,
		h("div.panels", Object.values(panels).map(({ node }) => node))), update };
}

function split(lately) {
	const known = Object.keys(PARTS).filter((id) => lately?.[id] != null);
	const total = known.reduce((sum, id) => sum + lately[id], 0);
	if (!total) return h("p.empty", NOTHING);
	const segments = known.map((id) => h(`i.${id}`));
	known.forEach((id, at) => (segments[at].style.flexGrow = lately[id] / total));
	return [h("div.split", { "aria-hidden": "true" }, segments), h("ul.bars", known.map((id) =>
		h("li", h("span", h(`i.${id}`), PARTS[id]), h("span.soft", share(lately[id] / total)), h("span.value", duration(lately[id])))))];
}

function shares(counts = {}) {
	const total = Object.values(counts).reduce((sum, one) => sum + one, 0);
	return Object.entries(counts).map(([key, one]) => ({ key, value: one / total, text: share(one / total) }));
}

function errorNode({ time, code, count: times, text }) {
	return h("div.error", h("p.hint", `${clock(time)} · ${code}${times > 1 ? ` · ${count(times)} times` : ""}`),
		h("pre", text || "Only the role operate may read the text: set a token."));
}

function instanceTable(all) {
	const rows = (number) => (number ? plural(number, "row") : NOTHING);
	return table("Instances", ["Instance", "State", "Device", "#Busy since", "#Batch", "#Next", "#Memory", "#CPU time", "#Restarts", "#Process", "Note"], all.map((one) => {
		const state = one.state === "ready" ? (one.quarantined && "quarantined") || (one.passive && "passive") || "ready" : one.state;
		return [one.name, h("span.state", { "data-state": state }, state), one.kind === "KIND_GPU" ? `GPU ${one.device ?? 0}` : "CPU",
			one.batch_rows ? duration(one.batch_seconds ?? 0) : NOTHING, rows(one.batch_rows), rows(one.waiting_rows), bytes(one.memory_bytes),
			duration(one.cpu_seconds), count(one.restarts ?? 0), one.pid ? `${one.pid}` : NOTHING,
			[one.reason, one.retry_seconds && `next attempt in ${duration(one.retry_seconds)}`].filter(Boolean).join("; ")];
	}));
}

function configuration({ metadata, config, text }) {
	const tensors = (label, list) => h("section.panel", h("h2", label),
		table(label, ["Name", "Type", "Shape"], list.map(({ name, datatype, shape }) => [name, datatype, h("code", `[${shape.join(", ")}]`)])));
	const groups = (config.instance_group ?? []).map((one) => `${one.count} × ${one.kind.replace("KIND_", "")}`).join(", ");
	const { dynamic_batching: dynamic, sequence_batching: sequence } = config;
	return [facts(h("dl.facts"), [["Backend", config.backend || config.platform], ["Largest batch", count(config.max_batch_size ?? 0)],
		dynamic && ["Batching", `waits at most ${duration((dynamic.max_queue_delay_microseconds ?? 0) / 1e6)}`],
		sequence && ["Batching", "by sequence"], groups && ["Instances", groups]]),
	h("div.panels", metadata && [tensors("Inputs", metadata.inputs), tensors("Outputs", metadata.outputs)],
		codePanel("Configuration as loaded", text, "config"))];
}
