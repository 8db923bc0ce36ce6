/** What the server has last reported. Invariant: every history gets a value with every event, so all have the same time axis. */

import {History} from "./rates.js"

const QUIET_S = 60
const EVENTS = 200
/** The figures of language models whose history is kept. */
const LANGUAGE = ["generated_tokens_per_s", "prompt_tokens_per_s", "first_token_p95", "first_token_p50", "between_tokens_p95", "between_tokens_p50"]
const SERIES = ["requests", "failed", "p50", "p99", "queue", "running", "wait"]
const IDLE = {requests: 0, failed: 0, p50: null, p99: null, batch: null, busy: 0, wait: null}

/** A version of a model. `row`: as received. `rates`: of the last interval, or null. `failed`: when failures were last reported. */
class Entry {
	constructor(row) {
		this.name = row.name
		this.version = row.version ?? ""
		this.history = new History([...SERIES, ...LANGUAGE])
		this.rates = null
		this.failed = -Infinity
		this.marks = []
		this.take(row)
	}

	take(row) {
		const {last_failed_change: failed, instances = []} = row
		const unloaded = row.reason === "unloaded"
		this.row = row
		this.counters = row.counters ?? {}
		this.state = unloaded || !row.state ? "NOT LOADED" : row.state === "READY" && row.reloading ? "RELOADING"
			: row.degraded ? "DEGRADED" : row.asleep ? "ASLEEP" : row.state
		this.reason = [!unloaded && row.reason, failed?.reason, row.changed_on_disk && "changed on disk"].filter(Boolean).join("; ")
		this.broken = Boolean(failed) || /UNAVAILABLE|DEGRADED/.test(this.state)
		this.instances = instances.filter(({state}) => state !== "stopped")
		this.expected = this.instances.filter(({state}) => state !== "stopping").length
		this.ready = this.instances.filter(({state}) => state === "ready").length
		this.bounds = row.scaled ? row.scaled.join("-") : ""
		this.memory = instances.reduce((sum, one) => sum + (one.memory_bytes ?? 0), 0)
	}

	/** It does not serve as it should, or requests have failed in the time that the history covers. */
	get failing() {
		return this.broken || this.history.last("failed").some(value => value > 0)
	}
}

/** What operators have set for a version: its share of the requests that name none, its aliases, and its share as a shadow. */
function marksOf({version, row}, {shares, aliases, shadow}) {
	const named = Object.keys(aliases).filter(alias => `${aliases[alias]}` === version)
	return [Object.keys(shares).length && `${row.share ?? 0} %`, ...named.map(alias => `@${alias}`), shadow[version] && `shadow ${shadow[version]} %`].filter(Boolean)
}

const keyOf = (name, version = "") => `${name}\n${version}`

export const stateOf = ({ready, out_of_service: drained}) => (drained ? "out of service" : ready ? "ready" : "not ready")

export class Store {
	constructor(notify) {
		this.notify = notify
		this.models = new Map()
		this.server = {}
		this.gpus = []
		this.figures = [] // of language models: key, name, unit and help
		this.now = 0
		this.history = new History(SERIES)
		this.times = {} // of the requests of the last interval, by bucket
		this.events = [] // what has happened: number, time, text, and for some bad, model and version
		this.listeners = new Set()
	}

	watch(listener) {
		this.listeners.add(listener)
		return () => this.listeners.delete(listener)
	}

	/** The shares, aliases and shadow of a model, if any are set: in the row of its first version. */
	traffic(name) {
		return this.versions(name).find(({row}) => row.traffic)?.row.traffic
	}

	versions(name) {
		return [...this.models.values()].filter(entry => entry.name === name)
	}

	find(name, version) {
		const all = this.versions(name)
		return version ? all.find(entry => entry.version === version) : all.find(({row}) => row.default) ?? all.at(-1)
	}

	/** Puts what the server has recorded before what the events have reported. */
	seed({second, fine, trends = []}) {
		this.history.seed(second, fine)
		for (const {name, version, ...recorded} of trends) this.models.get(keyOf(name, version))?.history.seed(second, recorded)
	}

	take(event, {time_ns, server, gpus = [], total, rates, models, figures = this.figures, gone = [], events = []}) {
		const time = time_ns / 1e9
		const old = this.server
		const restarted = old.pid && (server.pid !== old.pid || time < this.now)
		const seconds = this.now && !restarted ? time - this.now : 0
		const cpu = seconds > 0 ? (server.cpu_seconds - old.cpu_seconds) / seconds : null
		Object.assign(this, {server: {...server, cpu}, gpus, figures, now: time, times: total.times})
		const changed = new Set()
		for (const row of models) {
			const key = keyOf(row.name, row.version)
			changed.add(key)
			const entry = this.models.get(key)
			if (entry) entry.take(row)
			else this.models.set(key, new Entry(row))
		}
		if (event === "state") for (const key of this.models.keys()) if (!changed.has(key)) this.models.delete(key)
		for (const [name, version] of gone) this.models.delete(keyOf(name, version))
		this.#record(Math.floor(time), seconds, total, rates)
		this.events = [...(event === "state" ? [] : this.events), ...events].slice(-EVENTS)
		if (event !== "state") for (const {text, bad, model: name, version} of events) this.notify(name ? `${name} ${version}: ${text}` : text, name && {name, version}, bad)
		for (const listener of this.listeners) listener()
	}

	#record(second, seconds, total, rates) {
		const measured = new Map(rates.map(([name, version, one]) => [keyOf(name, version), one && {...IDLE, ...one}]))
		const traffic = Object.fromEntries([...this.models.values()].filter(({row}) => row.traffic).map(({name, row}) => [name, row.traffic]))
		for (const [key, entry] of this.models) {
			const {row} = entry
			entry.marks = Object.hasOwn(traffic, entry.name) ? marksOf(entry, traffic[entry.name]) : []
			entry.rates = !row.version ? null : measured.has(key) ? measured.get(key) : IDLE
			entry.history.push(second, seconds, {...row.figures, ...entry.rates, queue: row.queued ?? 0, running: row.in_flight ?? 0})
			if (!entry.rates?.failed) continue
			if (this.now - entry.failed > QUIET_S) this.notify(`${entry.name} ${entry.version}: requests fail`, entry, true)
			entry.failed = this.now
		}
		this.history.push(second, seconds, total)
	}
}
