/** Requests, and the tokens for them. Invariant: a token is in the memory of this module only, and is sent only to the
 * servers for which it was entered. */

import {find, h, show, write} from "./dom.js"
import {modelPath} from "./route.js"

const ALL = "*"
const tokens = new Map() // by origin; "" is this server
let others = []

export let changes = 0 // of tokens

/** Whether an error means that a request needs a token, or one with more roles. */
export const isRefused = ({status}) => status === 401 || status === 403

export const hasToken = () => Boolean(tokens.get(""))

/** A response, or an Error with its `status`. Asks for a missing token of this server. */
export async function call(method, url, body, headers = {}, signal = undefined) {
	const origin = url.startsWith("/") ? "" : new URL(url).origin
	const token = tokens.get(origin)
	if (token) headers.Authorization = `Bearer ${token}`
	let answer
	try {
		answer = await fetch(url, {method, body, signal, headers, cache: "no-store"})
	} catch (error) {
		const why = origin ? `it does not answer, or ${location.origin} is not in its --page-servers` : `no server answers (${error.message})`
		throw signal?.aborted ? signal.reason : new Error(why)
	}
	if (answer.ok) return answer
	const {status} = answer // a stream that fails at once answers with an event, and a proxy's error is not JSON
	const {error = `status ${status}`} = await answer.text().then(text => JSON.parse(text.replace(/^data: /, ""))).catch(() => ({}))
	if (status === 401 && !origin) askToken(error.message ?? error)
	throw Object.assign(new Error(error.message ?? error), {status})
}

/** What the server has recorded in the last hour, of itself or of a version, which may be too new for any. */
export async function history(model = "", version = "") {
	const answer = await call("GET", model ? modelPath("/page/history", model, version) : "/page/history").catch(error => {
		if (error.status !== 404) throw error
	})
	return answer ? answer.json() : {second: 0, fine: {}, coarse: {}}
}

export function askToken(reason = "") {
	write(find("token-reason"), reason)
	if (!find("token-dialog").open) find("token-dialog").showModal()
}

/** Lets the user choose for which server a token is. */
export function offerServers(origins) {
	others = origins
	const choices = [["", "this server"], ...origins.map(origin => [origin, new URL(origin).host]), [ALL, "all servers"]]
	find("token-server").replaceChildren(...choices.map(([value, text]) => h("option", {value}, text)))
	show(find("token-choice"), true)
}

/** `changed(origin)` is called for each server whose token has changed. */
export function initAccess(changed) {
	find("access").onclick = () => askToken()
	find("token-form").onsubmit = event => {
		event.preventDefault()
		const token = find("token").value.trim()
		const chosen = find("token-server").value
		const origins = chosen === ALL ? ["", ...others] : [chosen]
		for (const origin of origins) tokens.set(origin, token)
		changes++
		find("token").value = ""
		find("token-dialog").close()
		write(find("access"), [...tokens.values()].some(Boolean) ? "Token set" : "Token")
		origins.forEach(changed)
	}
}
