/** The servers that the page shows together. Each has an event stream of its own, so that a slow one delays no other. */

import {call, isRefused} from "./access.js"
import {History, add, quantile} from "./rates.js"
import {Store, stateOf} from "./store.js"
import {follow} from "./stream.js"

const SAMPLE_MS = 1000
const TOTALS = ["requests", "failed", "queue", "running"]

/** `origin`: "" for the one that the page comes from. `state`: as reported, or why nothing is. `fresh`: it has reported
 * since the last sample. */
class Server {
	constructor(origin, store, notify) {
		Object.assign(this, {origin, store, notify, connect: null, live: false, fresh: false, state: "connecting", reason: ""})
		this.name = new URL(origin || location.origin).host
		this.version = ""
	}

	get marks() {
		return [this.store.server.version, !this.origin && "this server"].filter(Boolean)
	}

	get history() {
		return this.store.history
	}

	/** The last value of a series of its history. */
	last(name) {
		return this.live ? this.history.last(name, 1)[0] : null
	}

	count(matches) {
		return this.live ? [...this.store.models.values()].filter(matches).length : null
	}

	heard() {
		this.fresh = true
		this.#become(true, stateOf(this.store.server), "")
	}

	lost(error) {
		this.fresh = false
		this.#become(false, isRefused(error) ? "refused" : "unreachable", error.status === 401 ? "it needs a token: use the button Token" : error.message)
	}

	#become(live, state, reason) {
		if (state !== this.state && this.state !== "connecting") this.notify(`${this.name}: ${state}`, state !== "ready")
		Object.assign(this, {live, state, reason})
	}

	follow() {
		const open = signal => call("GET", `${this.origin}/page/events`, undefined, {}, signal)
		this.connect = follow(open, (name, document) => {
			if (name === "down") return this.lost({message: document.error})
			this.store.take(name, document)
			this.heard()
		}, error => this.lost(error))
	}
}

export class Fleet {
	constructor(store, notify) {
		this.notify = notify
		this.own = new Server("", store, () => {})
		this.servers = [this.own]
		this.history = new History([...TOTALS, "p50", "p99"])
		this.listeners = new Set()
	}

	watch(listener) {
		this.listeners.add(listener)
		return () => this.listeners.delete(listener)
	}

	/** Origins of the other servers. */
	get others() {
		return this.servers.slice(1).map(({origin}) => origin)
	}

	get ready() {
		return [this.servers.filter(({state}) => state === "ready").length, this.servers.length]
	}

	/** Follows these servers. They stay the same until the page is loaded again, as its policy allows no others. */
	begin(origins) {
		const others = origins.filter(origin => origin !== location.origin)
		if (!others.length || this.servers.length > 1) return false
		for (const origin of others) this.servers.push(new Server(origin, new Store(() => {}), this.notify))
		for (const server of this.servers.slice(1)) server.follow()
		setInterval(() => this.#sample(), SAMPLE_MS)
		this.#sample()
		return true
	}

	connect(origin) {
		this.servers.find(server => server.origin === origin).connect()
	}

	/** Invariant: while none reports, as in a hidden tab, the history has no values either. */
	#sample() {
		if (this.servers.some(({fresh}) => fresh)) this.#record()
		for (const listener of this.listeners) listener()
	}

	#record() {
		const second = Math.floor(performance.now() / SAMPLE_MS)
		const total = Object.fromEntries(TOTALS.map(name => [name, 0]))
		const times = {}
		for (const server of this.servers.filter(({live}) => live)) {
			for (const name of TOTALS) total[name] += server.last(name) || 0
			add(times, server.store.times)
			server.fresh = false
		}
		this.history.push(second, 1, {...total, p50: quantile(times, 0.5), p99: quantile(times, 0.99)})
	}
}
