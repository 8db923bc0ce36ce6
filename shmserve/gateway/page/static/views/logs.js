/** The log of a model, for operators: the latest records, and new ones as they come. */

import {askToken, call, changes, isRefused} from "../access.js"
import {h, write} from "../dom.js"
import {clock} from "../format.js"

const FOLLOW_MS = 1000
const KEPT = 1000
const NEAR_PX = 40

const pathOf = (model, after) => `/shmserve/logs/models/${encodeURIComponent(model)}${after ? `/versions/${after}` : ""}`

export function logPart(model) {
	const lines = h("ol.log", {tabindex: 0, label: "Log"})
	const status = h("p.hint", {role: "status"})
	const words = h("input", {type: "search", placeholder: "Filter by level or text", label: "Filter the log", autocomplete: "off", oninput: filter})
	let after = 0
	let following = null

	function filter() {
		const wanted = words.value.toLowerCase()
		let count = 0
		for (const line of lines.children) {
			line.hidden = !line.textContent.toLowerCase().includes(wanted)
			count += line.hidden ? 0 : 1
		}
		write(status, `${count} of ${lines.children.length} records`)
	}

	async function read(signal) {
		const token = changes
		try {
			const answer = await (await call("GET", pathOf(model, after), undefined, {}, signal)).json()
			after = answer.next
			add(answer.records)
			setTimeout(next, answer.more ? 0 : FOLLOW_MS, signal)
		} catch (error) {
			if (signal.aborted) return
			write(status, `The log cannot be read: ${error.message}`)
			if (error.status === 403) askToken(error.message)
			setTimeout(next, FOLLOW_MS, signal, isRefused(error) ? token : NaN)
		}
	}

	/** Reads on, but not with a token that was refused. */
	function next(signal, refused = NaN) {
		if (signal.aborted) return
		if (refused === changes) setTimeout(next, FOLLOW_MS, signal, refused)
		else read(signal)
	}

	function add(records) {
		const end = lines.scrollHeight - lines.scrollTop - lines.clientHeight < NEAR_PX
		lines.append(...records.map(({time, level, text, traceback}) =>
			h(`li.${level}`, h("span.hint", clock(time)), ` ${level.toUpperCase()} ${text}`, traceback && h("pre", traceback))))
		while (lines.children.length > KEPT) lines.firstChild.remove()
		filter()
		if (end) lines.scrollTop = lines.scrollHeight
	}

	return {
		node: h("section.panel", h("div.tools", words, status), lines),
		follow(wanted) {
			if (wanted === Boolean(following)) return
			following?.abort()
			following = wanted ? new AbortController() : null
			if (following) read(following.signal)
		},
	}
}
