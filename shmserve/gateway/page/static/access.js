/** Requests, and the token for them. Invariant: the token is in the memory of this module only. */

import {find, write} from "./dom.js"

let token = ""

export let changes = 0 // of the token

export const hasToken = () => token !== ""

/** A response, or an Error with its `status`. Asks for a missing token. */
export async function call(method, path, body, headers = {}, signal = undefined) {
	if (token) headers.Authorization = `Bearer ${token}`
	let answer
	try {
		answer = await fetch(path, {method, body, signal, headers, cache: "no-store"})
	} catch (error) {
		throw signal?.aborted ? signal.reason : new Error(`no server answers (${error.message})`)
	}
	if (answer.ok) return answer
	const {status} = answer // a stream that fails at once answers with an event, and a proxy's error is not JSON
	const {error = `status ${status}`} = await answer.text().then(text => JSON.parse(text.replace(/^data: /, ""))).catch(() => ({}))
	if (status === 401) askToken(error)
	throw Object.assign(new Error(error), {status})
}

export function askToken(reason = "") {
	write(find("token-reason"), reason)
	if (!find("token-dialog").open) find("token-dialog").showModal()
}

export function initAccess(changed) {
	find("access").onclick = () => askToken()
	find("token-form").onsubmit = event => {
		event.preventDefault()
		token = find("token").value.trim()
		changes++
		find("token").value = ""
		find("token-dialog").close()
		write(find("access"), token ? "Token set" : "Token")
		changed()
	}
}
