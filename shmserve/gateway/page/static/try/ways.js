/** The ways to try a model: as the language or embedding model that it is, and by its tensors. */

import {call} from "../access.js"
import {h, set} from "../dom.js"
import {chat} from "./chat.js"
import {compareTexts} from "./embeddings.js"
import {tryForm} from "./form.js"

const isText = tensors => name => tensors.some(one => one.name === name && one.datatype === "BYTES")

/** How a client of OpenAI can use the model: {title, node} or null. */
async function textWay({name: model, metadata, config}) {
	const inputs = isText(metadata.inputs)
	if (inputs("audio") || !metadata.inputs.some(({datatype}) => datatype === "BYTES")) return null
	const listed = await call("GET", `/v1/models/${encodeURIComponent(model)}`).then(() => true, () => false)
	if (!listed) return null
	if (!inputs("text_input") || !isText(metadata.outputs)("text_output")) return {title: "Texts", make: () => compareTexts(model)}
	const chats = inputs("messages") || Boolean(config.parameters?.chat_template)
	return {title: chats ? "Chat" : "Text", make: () => chat(model, chats, inputs("image"))}
}

/** `several`: the model has several versions. */
export async function ways(details, version, ports, several) {
	const text = await textWay(details)
	if (!text) return () => [tryForm(details, version, ports)]
	const all = [text, {title: "Tensors", make: () => tryForm(details, version, ports)}]
	return () => {
		const body = h("div")
		const chips = all.map(one => h("button.chip", {onclick: () => choose(one)}, one.title))
		const hint = several && h("span.hint", `${text.title}: the version that requests without a version get`)
		function choose(way) {
			chips.forEach(chip => set(chip, "aria-pressed", `${chip.textContent === way.title}`))
			way.node ??= way.make()
			body.replaceChildren(way.node)
		}
		choose(text)
		return [h("div.chips.ways", {role: "group", label: "Ways to try the model"}, chips, hint), body]
	}
}
