/** Two texts, and how similar their embeddings are. */

import {call} from "../access.js"
import {codePanel, h, set, write} from "../dom.js"
import {duration, element} from "../format.js"
import {embeddingsCode} from "./openai.js"

const SHOWN = 8
const dot = (one, other) => one.reduce((sum, value, at) => sum + value * other[at], 0)

export function compareTexts(model) {
	const texts = ["first", "second"].map(name => h("textarea", {id: name, rows: 3}))
	const dimensions = h("input", {type: "number", min: 1, id: "dimensions"})
	const status = h("span.hint", {role: "status"})
	const result = h("div.panel", {id: "similarity", "aria-live": "polite", hidden: true})
	const codes = ["curl", "Python"].map(title => codePanel(title, "", title.toLowerCase()))
	const form = h("form", {id: "texts", onsubmit: submit, oninput: writeCode},
		texts.map((area, at) => [h("label", {for: area.id}, ["One text", "Another text"][at]), area]),
		h("label", "dimensions (empty: all) ", dimensions), h("p", h("button", {type: "submit"}, "Compare"), " ", status))

	const body = () => ({model, input: texts.map(({value}) => value), ...(dimensions.value && {dimensions: dimensions.valueAsNumber})})

	function writeCode() {
		Object.values(embeddingsCode(body())).forEach((text, at) => write(codes[at].lastChild, text))
	}

	async function submit(event) {
		event.preventDefault()
		result.hidden = true
		write(status, "running …")
		try {
			const began = performance.now()
			const answer = await call("POST", "/v1/embeddings", JSON.stringify({...body(), encoding_format: "float"}))
			const vectors = (await answer.json()).data.map(({embedding}) => embedding)
			set(status, "role", "status")
			write(status, `answered in ${duration((performance.now() - began) / 1000)}`)
			draw(vectors)
		} catch (error) {
			set(status, "role", "alert")
			write(status, error.message)
		}
	}

	function draw([one, other]) {
		const lengths = [one, other].map(vector => Math.sqrt(dot(vector, vector)))
		const cosine = dot(one, other) / (lengths[0] * lengths[1])
		const values = vector => `[${vector.slice(0, SHOWN).map(element).join(", ")}${vector.length > SHOWN ? ", …" : ""}]`
		result.replaceChildren(h("h2", "Cosine similarity ", h("b", {"data-cosine": cosine}, cosine.toFixed(4))),
			h("meter", {min: -1, max: 1, value: cosine, label: "Cosine similarity"}),
			h("p.hint", `${one.length} dimensions; dot product ${element(dot(one, other))}`),
			...[one, other].map((vector, at) => h("pre", `length ${element(lengths[at])} ${values(vector)}`)))
		result.hidden = false
	}

	writeCode()
	return h("div.trial", form, result, h("div.panels.wide", codes))
}
