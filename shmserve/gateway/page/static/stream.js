/** The event stream. It is read with fetch, as EventSource can neither send a token nor tell why it was refused. */

import {isRefused} from "./access.js"

const RETRY_MS = 500
const MAX_MS = 8000
const SILENT_MS = 15_000
const HIDDEN_MS = 300_000

/** Follows the stream that `open(signal)` requests: calls `event(name, document)` and, while there is none, `lost(error)`.
 * After the status 401 or 403 it waits for a call of the function that it returns. */
export function follow(open, event, lost) {
	let pause = RETRY_MS
	let timer = 0
	let current = null

	function leave() {
		clearTimeout(timer)
		const previous = current
		current = null
		previous?.abort()
	}

	async function connect() {
		leave()
		const controller = (current = new AbortController())
		const silence = () => {
			clearTimeout(timer)
			timer = setTimeout(() => controller.abort(new Error("the server has sent nothing for 15 seconds")), SILENT_MS)
		}
		try {
			silence()
			const answer = await open(controller.signal)
			await read(answer, (name, text) => {
				pause = RETRY_MS
				event(name, JSON.parse(text))
			}, silence)
			throw new Error("the server has closed the stream")
		} catch (error) {
			if (controller !== current) return
			clearTimeout(timer)
			lost(error)
			if (!isRefused(error)) timer = setTimeout(connect, pause)
			pause = Math.min(2 * pause, MAX_MS)
		}
	}

	let hidden = 0
	document.addEventListener("visibilitychange", () => {
		clearTimeout(hidden)
		if (document.hidden) hidden = setTimeout(leave, HIDDEN_MS)
		else if (!current) connect()
	})
	connect()
	return connect
}

export async function read(answer, event, progress = () => {}) {
	const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader()
	let rest = ""
	for (;;) {
		const {done, value} = await reader.read()
		if (done) return
		progress()
		const blocks = (rest + value).split("\n\n")
		rest = blocks.pop()
		for (const block of blocks) {
			const field = name => block.match(new RegExp(`^${name}: ?(.*)$`, "m"))?.[1]
			if (field("data") !== undefined) event(field("event"), field("data"))
		}
	}
}
