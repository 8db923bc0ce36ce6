/** Requests, and the token for them. Invariant: the token is in the memory of this module only. */

import { find, write } from "./dom.js";

let token = "";

export const hasToken = () => token !== "";

/** A response, or an Error with the `status` of the response. Asks for a token if one is missing. */
export async function call(method, path, body, headers = {}, signal = undefined) {
	if (token) headers.Authorization = `Bearer ${token}`;
	let answer;
	try {
		answer = await fetch(path, { method, body, signal, headers, cache: "no-store" });
	} catch (error) {
		throw signal?.aborted ? signal.reason : new Error(`no server answers (${error.message})`);
	}
	if (answer.ok) return answer;
	const text = await answer.text();
	let reason = text.slice(0, 500) || `status ${answer.status}`;
	try {
		reason = JSON.parse(text).error ?? reason;
	} catch {
		// a proxy's text
	}
	if (answer.status === 401) askToken(reason);
	throw Object.assign(new Error(reason), { status: answer.status });
}

export function askToken(reason = "") {
	write(find("token-reason"), reason);
	if (!find("token-dialog").open) find("token-dialog").showModal();
}

/** `changed()`: called with each new token. */
export function initAccess(changed) {
	const use = (value) => {
		token = value;
		find("token").value = "";
		find("token-dialog").close();
		write(find("access"), token ? "Token set" : "Token");
		changed();
	};
	find("access").onclick = () => askToken();
	find("token-forget").onclick = () => use("");
	find("token-form").onsubmit = (event) => {
		event.preventDefault();
		use(find("token").value.trim());
	};
}
