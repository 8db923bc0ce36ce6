/** What the server has last reported. Invariant: every history gets one value per event, so all have the same time axis. */

import {History, add, between, quantile} from "./rates.js"

const QUIET_S = 60
/** The figures of language models whose history is kept. */
const LANGUAGE = ["generated_tokens_per_s", "prompt_tokens_per_s", "first_token_p95", "first_token_p50", "between_tokens_p95", "between_tokens_p50"]

/** A version of a model. `row`: as received. `rates`: of the last interval, or null. `failed`: when a request last did. */
class Entry {
	constructor(row) {
		this.name = row.name
		this.version = row.version ?? ""
		this.history = new History(["requests", "p50", "p99", "queue", ...LANGUAGE])
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
		this.failing = Boolean(failed) || /UNAVAILABLE|DEGRADED/.test(this.state)
		this.instances = instances.filter(({state}) => state !== "stopped")
		this.expected = this.instances.filter(({state}) => state !== "stopping").length
		this.ready = this.instances.filter(({state}) => state === "ready").length
		this.bounds = row.scaled ? row.scaled.join("-") : ""
		this.memory = instances.reduce((sum, one) => sum + (one.memory_bytes ?? 0), 0)
	}

	get busy() {
		return this.rates && this.ready ? Math.min(1, this.rates.spent / this.ready) : null
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
	constructor(news) {
		this.news = news
		this.models = new Map()
		this.server = {}
		this.gpus = []
		this.figures = [] // of language models: key, name, unit and help
		this.now = 0
		this.history = new History(["requests", "failed", "p50", "p99", "queue", "running", "wait"])
		this.times = {} // of the requests of the last interval, by bucket
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

	take(event, {time_ns, server, gpus = [], models, figures = this.figures, gone = []}) {
		const time = time_ns / 1e9
		const old = this.server
		const restarted = old.pid && (server.pid !== old.pid || time < this.now)
		if (restarted) this.news(`${server.name} was restarted`)
		const seconds = this.now && !restarted ? time - this.now : 0
		const cpu = seconds > 0 ? (server.cpu_seconds - old.cpu_seconds) / seconds : null
		Object.assign(this, {server: {...server, cpu}, gpus, figures, now: time})
		const changed = new Set()
		for (const row of models) {
			const key = keyOf(row.name, row.version)
			changed.add(key)
			const entry = this.models.get(key)
			if (entry) this.#change(entry, row, seconds)
			else this.models.set(key, new Entry(row))
		}
		if (event === "state") for (const key of this.models.keys()) if (!changed.has(key)) this.models.delete(key)
		for (const [name, version] of gone) this.models.delete(keyOf(name, version))
		this.#record(changed, seconds)
		for (const listener of this.listeners) listener()
	}

	#change(entry, row, seconds) {
		const {state, counters} = entry
		entry.take(row)
		entry.rates = between(counters, entry.counters, seconds)
		const name = `${entry.name} ${entry.version}`
		if (entry.state !== state) this.news(`${name}: ${entry.state}${entry.reason && `, ${entry.reason}`}`, entry, entry.failing)
		else if (entry.rates?.failed && this.now - entry.failed > QUIET_S) this.news(`${name}: requests fail`, entry, true)
		if (entry.rates?.failed) entry.failed = this.now
	}

	#record(changed, seconds) {
		const total = {requests: 0, failed: 0, queue: 0, running: 0}
		const times = {}
		let [answered, waited] = [0, 0]
		const idle = between({}, {}, seconds)
		const traffic = Object.fromEntries([...this.models.values()].filter(({row}) => row.traffic).map(({name, row}) => [name, row.traffic]))
		for (const [key, entry] of this.models) {
			const {row} = entry
			entry.marks = Object.hasOwn(traffic, entry.name) ? marksOf(entry, traffic[entry.name]) : []
			if (!changed.has(key)) entry.rates = row.version ? idle : null
			const {rates} = entry
			entry.history.push({...row.figures, ...rates, queue: row.queued ?? 0})
			total.queue += row.queued ?? 0
			total.running += row.in_flight ?? 0
			total.requests += rates?.requests ?? 0
			total.failed += rates?.failed ?? 0
			answered += rates?.answered ?? 0
			waited += (rates?.queue ?? 0) * (rates?.answered ?? 0)
			add(times, rates?.times)
		}
		if (!seconds) total.requests = total.failed = NaN
		this.times = times
		this.history.push({...total, wait: answered ? waited / answered : NaN, p50: quantile(times, 0.5), p99: quantile(times, 0.99)})
	}
}
