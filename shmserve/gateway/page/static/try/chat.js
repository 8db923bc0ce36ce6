/** A conversation with a language model. */

import {call} from "../access.js"
import {button, codePanel, h, set, write} from "../dom.js"
import {rate} from "../format.js"
import {read} from "../stream.js"
import {chatCode} from "./openai.js"

const FIELDS = [["temperature", 0.1, 2], ["top_p", 0.05, 1], ["max_tokens", 1, 1 << 30]]

function parsed(area, what) {
	set(area, "aria-invalid", "true")
	try {
		const value = area.value.trim() ? JSON.parse(area.value) : undefined
		set(area, "aria-invalid", null)
		return value
	} catch (error) {
		throw new Error(`${what}: ${error.message}`)
	}
}

function dataUrl(file) {
	return new Promise((done, failed) => {
		const reader = new FileReader()
		reader.onload = () => done(reader.result)
		reader.onerror = () => failed(reader.error)
		reader.readAsDataURL(file)
	})
}

/** `chats`: the model answers messages; otherwise it continues a text. `sees`: it takes images. */
export function chat(model, chats, sees) {
	let messages = []
	let waiting = [] // calls of tools whose results the user has not entered yet
	let running = null
	const system = h("textarea", {id: "system", rows: 2, placeholder: "You are a helpful assistant."})
	const numbers = FIELDS.map(([name, step, max]) => [name, h("input", {type: "number", min: 0, max, step, id: name})])
	const tools = h("textarea", {id: "tools", rows: 2, spellcheck: "false", placeholder: '[{"type": "function", "function": {"name": "time"}}]'})
	const more = h("textarea", {id: "more", rows: 1, spellcheck: "false", placeholder: '{"seed": 1}'})
	const label = h("label", {for: "message"})
	const message = h("textarea", {id: "message", rows: 3})
	const file = h("input.unseen", {type: "file", id: "images", accept: "image/*", multiple: true, onchange: () => write(chosen, [...file.files].map(one => one.name).join(", "))})
	const chosen = h("span.hint")
	const send = h("button", {type: "submit"}, "Send")
	const status = h("span.hint", {role: "status"})
	const talk = h("ol.talk", {id: "talk", "aria-live": "polite"})
	const codes = ["curl", "Python"].map(title => codePanel(title, "", title.toLowerCase()))
	const form = h("form", {id: "chat", onsubmit: submit, oninput: writeCode, onkeydown: event => {
		if (event.key !== "Enter" || event.shiftKey || event.target !== message) return
		event.preventDefault()
		form.requestSubmit()
	}}, talk, label, message, h("p", send, " ", button("Clear", clear, {id: "clear"}),
		sees && [" ", file, h("label.button", {for: "images"}, "Add images"), " ", chosen], " ", status))
	const settings = h("div.panel.settings", chats && [h("label", {for: "system"}, "System prompt"), system],
		numbers.map(([name, input]) => h("label", `${name} `, input)),
		chats && [h("label", {for: "tools"}, "Tools, as JSON"), tools], h("label", {for: "more"}, "Other fields, as JSON"), more)
	settings.addEventListener("input", writeCode)

	function body() {
		const sampling = Object.fromEntries(numbers.filter(([, {value}]) => value).map(([name, {valueAsNumber}]) => [name, valueAsNumber]))
		const fields = {model, ...sampling, ...parsed(more, "Other fields")}
		if (!chats) return fields
		const first = system.value.trim() ? [{role: "system", content: system.value}] : []
		return {...fields, tools: parsed(tools, "Tools"), messages: [...first, ...messages]}
	}

	function writeCode() {
		try {
			const fields = body()
			const text = message.value || "Hello"
			if (chats) fields.messages = [...fields.messages, {role: "user", content: text}]
			else fields.prompt = text
			Object.entries(chatCode(fields, chats)).forEach(([, text], at) => write(codes[at].lastChild, text))
		} catch { /* the form shows what is not JSON when it is sent */ }
	}

	function clear() {
		running?.abort(new Error("stopped"))
		messages = []
		waiting = []
		talk.replaceChildren()
		write(status, "")
		ask()
	}

	/** What the user is to enter next. */
	function ask() {
		write(label, waiting.length ? `Result of ${waiting[0].function.name}` : chats ? "Message" : "Text")
		writeCode()
	}

	function line(role, text = "") {
		const node = h("li", {"data-role": role}, h("b.soft", role), h("div.said", text))
		talk.append(node)
		node.scrollIntoView({block: "nearest"})
		return node.lastChild
	}

	async function userContent(text) {
		const images = await Promise.all([...file.files].map(dataUrl))
		file.value = ""
		write(chosen, "")
		return images.length ? [...images.map(url => ({type: "image_url", image_url: {url}})), {type: "text", text}] : text
	}

	async function submit(event) {
		event.preventDefault()
		if (running) return running.abort(new Error("stopped"))
		const text = message.value
		if (!text && !waiting.length) return
		running = new AbortController()
		try {
			const fields = body() // what is not JSON is an error before anything is said
			message.value = ""
			if (waiting.length) {
				messages.push({role: "tool", tool_call_id: waiting.shift().id, content: text})
				line("tool", text)
			} else {
				const content = await userContent(text)
				messages.push({role: "user", content})
				const said = line("user", text)
				if (content !== text) said.append(...content.filter(one => one.image_url).map(one => h("img", {src: one.image_url.url, alt: "an image"})))
			}
			if (!waiting.length) {
				write(send, "Stop")
				await answer(chats ? body() : {...fields, prompt: text})
			}
		} catch (error) {
			write(status, "")
			set(line("error", error.message), "role", "alert")
		}
		running = null
		write(send, "Send")
		ask()
		message.focus()
	}

	async function answer(fields) {
		const said = line("assistant")
		const thought = h("p.hint.said")
		const whole = {role: "assistant", content: ""}
		const conversation = messages // Clear begins another
		said.before(thought)
		let tokens = 0
		let began = 0
		let frame = 0
		const show = () => {
			frame = 0
			write(said, whole.content)
		}
		write(status, "…")
		const url = chats ? "/v1/chat/completions" : "/v1/completions"
		const sent = JSON.stringify({...fields, stream: true, stream_options: {include_usage: true}})
		try {
			await read(await call("POST", url, sent, {}, running.signal), (_, data) => {
				if (data === "[DONE]") return
				const {error, choices = [], usage} = JSON.parse(data)
				if (error) throw new Error(error.message)
				for (const {delta, text} of choices) {
					take(whole, delta ?? {content: text})
					thought.append(delta?.reasoning_content ?? "")
				}
				tokens = usage?.completion_tokens ?? tokens + choices.length
				if (!began && (whole.content || thought.textContent)) began = performance.now()
				frame ||= requestAnimationFrame(show) // not for each token of a fast model
			})
		} catch (error) {
			if (!running.signal.aborted) throw error
			set(said, "data-stopped", true)
		} finally {
			cancelAnimationFrame(frame)
			show()
			if (whole.tool_calls) said.append(...whole.tool_calls.map(({function: {name, arguments: text}}) => h("pre", {"data-call": name}, `${name}(${text})`)))
			const seconds = (performance.now() - began) / 1000
			const speed = began && tokens > 1 ? `, ${rate((tokens - 1) / seconds)} tokens/s` : ""
			write(status, `${running.signal.aborted ? "stopped after " : ""}${tokens} tokens${speed}`)
			if (whole.content || whole.tool_calls) conversation.push(whole)
			waiting = running.signal.aborted ? [] : [...whole.tool_calls ?? []]
		}
	}

	ask()
	return h("div.trial.chat", form, settings, h("div.panels.wide", codes))
}

/** Adds a piece of a message. */
function take(whole, {content, tool_calls: calls = []}) {
	whole.content += content ?? ""
	for (const {index, ...call} of calls) {
		whole.tool_calls ??= []
		const known = whole.tool_calls[index]
		if (known) known.function.arguments += call.function.arguments ?? ""
		else whole.tool_calls[index] = {...call, function: {arguments: "", ...call.function}}
	}
}
