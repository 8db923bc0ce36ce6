/** The view of the endpoints. Its code and the server's OpenAPI document are loaded when it is first shown. */

import {button, h} from "../dom.js"

export const DOCUMENT = "/openapi.json"

export function apiView() {
	const body = h("div")

	async function load() {
		body.replaceChildren(h("p.empty", "loading …"))
		try {
			const {operations} = await import("./operations.js")
			body.replaceChildren(...await operations())
		} catch (error) {
			body.replaceChildren(h("p.problem", {role: "alert"}, error.message, " ", button("Try again", load)))
		}
	}

	load()
	return {
		nodes: [h("div.head", h("a.back", {href: "/#/", label: "Overview"}, "←"), h("h1", {tabindex: -1}, "API"), h("a", {href: DOCUMENT}, DOCUMENT)), body],
		go() {
			document.body.dataset.view = "api"
			document.title = "API – shmserve"
		},
		close() {},
	}
}
