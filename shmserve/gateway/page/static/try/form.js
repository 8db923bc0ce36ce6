/** A form made from a model's metadata, and the answer to what it sends. */

import {call} from "../access.js"
import {button, codePanel, h, set, show, write} from "../dom.js"
import {bytes as size, duration} from "../format.js"
import {read} from "../stream.js"
import {code, fitsJson, generateRequest, path} from "./code.js"
import {SCALES, imageLayout, imageValues} from "./image.js"
import {result} from "./results.js"
import {encode, fullShape, isLong, outputsOf, parse, product, request} from "./tensors.js"

const SEQUENCE = '{"sequence_id": 1, "sequence_start": true, "sequence_end": true}'

const number = (label, value, max, disabled) => h("input", {type: "number", min: 0, max, value, disabled, label})

/** The field of an input: {node, read}. `read()`: {name, datatype, shape, values, bytes, random, files, image}, or null. */
function field({name, datatype, shape}, {format, optional} = {}, changed) {
	const id = `in-${name}`
	const isText = datatype === "BYTES"
	const layout = isText || isLong(datatype) ? null : imageLayout(shape, format)
	const count = product(shape.map(Math.abs))
	const hint = isText ? "one text per line, or a list in JSON" : "separated by commas, a list in JSON, or: random"
	const text = h("textarea", {id, rows: isText ? 3 : 1, "data-input": name, spellcheck: "false", "aria-describedby": `${id}-hint`},
		isText || optional ? "" : count > 16 ? "random" : Array(count).fill(0).join(", "))
	const file = h("input.unseen", {type: "file", id: `${id}-file`, multiple: isText && count !== 1, onchange: () => take([...file.files])})
	const chosen = h("span.hint")
	const remove = button("Remove", () => take([]), {label: `Remove the file for ${name}`})
	const canvas = h("canvas", {role: "img", label: `The picture for ${name}`})
	const [width, height] = ["width", "height"].map(side => number(side, layout?.[side] > 0 ? layout[side] : 224, 4096, layout?.[side] > 0))
	const scale = h("select", {label: "Scale"}, Object.keys(SCALES).map(option => h("option", option)))
	if (/INT/.test(datatype)) scale.value = "0 to 255"
	const options = h("div.options", layout?.planes ? "NCHW" : "NHWC", width, "×", height, scale, canvas)
	let files = []

	function take(list) {
		files = list.slice(0, file.multiple ? list.length : 1)
		if (!files.length) file.value = ""
		text.disabled = files.length > 0
		write(chosen, files.map(one => `${one.name}, ${size(one.size)}`).join("; ") || "or drop it here")
		show(remove, files.length)
		show(options, layout && files[0]?.type.startsWith("image/"))
		changed()
	}

	async function fromFiles() {
		const names = files.map(one => one.name)
		if (isText) {
			const values = await Promise.all(files.map(async one => new Uint8Array(await one.arrayBuffer())))
			return {values, shape: fullShape(shape, values.length), files: names}
		}
		if (options.hidden) return parse(await files[0].text(), datatype, shape)
		const image = {width: width.valueAsNumber, height: height.valueAsNumber, scale: scale.value, layout}
		const values = await imageValues(files[0], image, canvas)
		const sides = layout.planes ? [layout.channels, image.height, image.width] : [image.height, image.width, layout.channels]
		return {values: /INT/.test(datatype) ? values.map(Math.round) : values, shape: [...shape.slice(0, -3).map(Math.abs), ...sides], image, files: names}
	}

	async function readField() {
		if (optional && !files.length && !text.value.trim()) return null
		set(text, "aria-invalid", "true")
		try {
			const parsed = await (files.length ? fromFiles() : parse(text.value, datatype, shape))
			const tensor = {...parsed, name, datatype, bytes: encode(parsed.values, datatype)}
			set(text, "aria-invalid", null)
			return tensor
		} catch (error) {
			throw new Error(`${name}: ${error.message}`)
		}
	}

	const node = h("fieldset.panel", {ondragover: event => event.preventDefault(), ondrop: event => {
		event.preventDefault()
		take([...event.dataTransfer.files])
	}}, h("label", {for: id}, h("b", name), h("span.soft", ` ${datatype} [${shape.join(", ")}]${optional ? ", optional" : ""}`)), text,
	h("p.hint", {id: `${id}-hint`}, count > 1 && hint),
	h("p", file, h("label.button", {for: file.id}, layout ? "Choose a picture" : "Choose a file"), " ", chosen, " ", remove), options)
	take([])
	return {node, read: readField}
}

export function tryForm({name: model, metadata, config, labels = []}, version, ports) {
	let timer = 0
	let running = null
	let complaint = ""
	const stream = Boolean(config.model_transaction_policy?.decoupled)
	const fields = metadata.inputs.map(input => field(input, config.input?.find(({name}) => name === input.name), writeSoon))
	const outputs = metadata.outputs.map(({name}) => ({name, top: !stream && labels.includes(name) && number(`Classes of ${name}`, 5, 1000)}))
	const parameters = h("textarea", {rows: 1, spellcheck: "false", label: "Parameters"}, config.sequence_batching ? SEQUENCE : "{}")
	const run = h("button", {type: "submit"}, "Run")
	const status = h("span.hint", {role: "status"})
	const answer = h("div.panels", {id: "result", "aria-live": "polite"})
	const codes = {curl: "curl", python: "Python", tritonclient: "Python with tritonclient"}
	for (const name of Object.keys(codes)) codes[name] = codePanel(codes[name], "", name)
	const save = h("a.button", {download: "request.bin"}, "Save request.bin for curl")
	const form = h("form", {id: "try", onsubmit: submit, oninput: writeSoon, onkeydown: event => {
		if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit()
	}}, fields.map(({node}) => node), outputs.map(({name, top}) => top && h("label", h("b", name), " best classes (0: all values) ", top)),
	h("details", h("summary", "Parameters"), parameters), h("p", run, " ", status))

	async function collect() {
		const inputs = (await Promise.all(fields.map(one => one.read()))).filter(Boolean)
		const wanted = outputs.map(({name, top}) => ({name, classes: top ? top.valueAsNumber || 0 : 0}))
		// A gateway that runs on its own does not report its ports: 8001 is the default for gRPC.
		const grpcPort = ports?.grpc ?? 8001
		return {model, version, stream, grpcPort, inputs, outputs: wanted, parameters: JSON.parse(parameters.value || "{}")}
	}

	function writeSoon() {
		clearTimeout(timer)
		timer = setTimeout(writeCode, 150)
	}

	async function writeCode() {
		try {
			const wanted = await collect()
			const {body, length} = request(wanted)
			for (const [name, text] of Object.entries(code(wanted, length))) write(codes[name].lastChild, text)
			URL.revokeObjectURL(save.href)
			save.href = URL.createObjectURL(body)
			show(save, !stream && !fitsJson(wanted))
			if (status.textContent === complaint) write(status, "")
		} catch (error) {
			complaint = error.message
			write(status, complaint)
		}
	}

	async function send(wanted, signal) {
		if (stream) {
			const list = h("ol.panel.wide", {"data-result": "json"})
			answer.replaceChildren(list)
			const sent = await call("POST", path(wanted, "generate_stream"), generateRequest(wanted), {}, signal)
			return read(sent, (_, text) => list.append(h("li", h("pre", text))))
		}
		const {body, length} = request(wanted, true)
		const results = await outputsOf(await call("POST", path(wanted, "infer"), body, {"Inference-Header-Content-Length": length}, signal))
		return answer.replaceChildren(...results.map(output => result(output, wanted.outputs.find(({name}) => name === output.name)?.classes > 0)))
	}

	async function submit(event) {
		event.preventDefault()
		if (running) return running.abort(new Error("cancelled"))
		running = new AbortController()
		write(run, "Cancel")
		write(status, "running …")
		try {
			const wanted = await collect()
			const began = performance.now()
			await send(wanted, running.signal)
			write(status, `answered in ${duration((performance.now() - began) / 1000)}`)
		} catch (error) {
			write(status, "")
			answer.replaceChildren(h("p.problem.wide", {role: "alert", "data-result": "error"}, error.message))
		}
		running = null
		write(run, "Run")
	}

	return h("div.trial", form, answer, save, h("div.panels.wide", Object.values(codes)))
}
