/** Tensors: text to values, values to bytes, and the binary form of requests. */

const MAX_VALUES = 1 << 26

export const isFloat = dtype => /^B?F/.test(dtype)
export const isLong = dtype => /INT64/.test(dtype)
export const product = dims => dims.reduce((result, size) => result * size, 1)

/** The values' shape: as they are nested, if that fits; otherwise unknown dimensions are 1, except for the last one. */
export function fullShape(dims, count, nesting = []) {
	if (nesting.length === dims.length && dims.every((size, at) => size === -1 || size === nesting[at]) && product(nesting) === count) return nesting
	const known = product(dims.filter(size => size !== -1))
	const last = dims.lastIndexOf(-1)
	const shape = dims.map((size, at) => (size !== -1 ? size : at === last ? count / known : 1))
	if (product(shape) === count && shape.every(Number.isInteger)) return shape
	throw new Error(`expected ${last < 0 ? "" : "a multiple of "}${known} values for the shape [${dims.join(", ")}], got ${count}`)
}

/** Reads a list in JSON, words, lines, or "random". 64-bit integers are BigInt. */
export function parse(text, dtype, dims) {
	const isText = dtype === "BYTES"
	const trimmed = text.trim()
	const smallest = dims.map(Math.abs)
	if (!isText && trimmed === "random") return {values: random(dtype, product(smallest)), shape: smallest, random: true}
	let list
	if (/^\[[^]*\]$/.test(trimmed)) list = JSON.parse(isText ? trimmed : trimmed.replace(/[-+.\w]+/g, '"$&"')) // keeps all digits
	else if (isText) list = product(smallest) > 1 ? text.split("\n") : [text]
	else list = trimmed.split(/[\s,]+/).filter(Boolean)
	const nesting = []
	for (let part = list; Array.isArray(part); part = part[0]) nesting.push(part.length)
	const values = list.flat(Infinity).map(word => (isText ? `${word}` : number(`${word}`, dtype)))
	return {values, shape: fullShape(dims, values.length, nesting)}
}

function number(word, dtype) {
	if (isFloat(dtype)) {
		const value = Number(word.replace(/inf(inity)?$/i, "Infinity"))
		if (Number.isNaN(value) && !/^nan$/i.test(word)) throw new Error(`'${word}' is not a number`)
		return value
	}
	if (dtype === "BOOL" && /^(true|false|0|1)$/i.test(word)) return /^[t1]/i.test(word)
	if (dtype === "BOOL" || !/^[-+]?\d+$/.test(word)) throw new Error(`'${word}' is not of the type ${dtype}`)
	const value = isLong(dtype) ? BigInt(word.replace("+", "")) : Number(word)
	if (arrayType(dtype).of(value)[0] !== value) throw new Error(`${word} is not in the range of ${dtype}`)
	return value
}

function random(dtype, length) {
	if (length > MAX_VALUES) throw new Error(`${length} values are too many for this page`)
	const scale = isFloat(dtype) ? 1 : dtype === "BOOL" ? 2 : 100
	const cast = isFloat(dtype) ? Number : isLong(dtype) ? value => BigInt(Math.floor(value)) : dtype === "BOOL" ? value => value >= 1 : Math.floor
	return Array.from({length}, () => cast(Math.random() * scale))
}

function arrayType(dtype) {
	const name = {BOOL: "Uint8", BF16: "Uint16"}[dtype] ?? dtype.replace("UINT", "Uint").replace("INT", "Int").replace("FP", "Float")
	const type = globalThis[`${isLong(dtype) ? "Big" : ""}${name}Array`]
	if (!type) throw new Error(`this browser has no ${dtype} numbers`)
	return type
}

export function encode(values, dtype) {
	if (dtype === "BYTES") {
		const parts = values.map(value => (typeof value === "string" ? new TextEncoder().encode(value) : value))
		return new Blob(parts.flatMap(part => [Uint32Array.of(part.length), part]))
	}
	const halves = value => new Uint32Array(Float32Array.of(value).buffer)[0] >>> 16
	return new Blob([arrayType(dtype).from(dtype === "BF16" ? Array.from(values, halves) : values)])
}

function decode(bytes, dtype) {
	if (dtype === "BYTES") {
		const items = []
		const view = new DataView(bytes.buffer)
		for (let at = 0; at < bytes.length; at += 4 + items.at(-1).length) items.push(bytes.subarray(at + 4, at + 4 + view.getUint32(at, true)))
		return items
	}
	const values = Array.from(new (arrayType(dtype))(bytes.buffer))
	if (dtype === "BF16") return values.map(half => new Float32Array(Uint32Array.of(half << 16).buffer)[0])
	return dtype === "BOOL" ? values.map(Boolean) : values
}

export function request({inputs, outputs, parameters}, binary) {
	const head = new Blob([JSON.stringify({
		inputs: inputs.map(({name, shape, datatype, bytes}) => ({name, shape, datatype, parameters: {binary_data_size: bytes.size}})),
		outputs: outputs.map(({name, classes}) => ({name, parameters: {binary_data: binary, classification: classes || undefined}})),
		parameters,
	})])
	return {length: head.size, body: new Blob([head, ...inputs.map(({bytes}) => bytes)])}
}

export async function outputsOf(answer) {
	const body = new Uint8Array(await answer.arrayBuffer())
	let at = Number(answer.headers.get("Inference-Header-Content-Length") ?? body.length)
	const {outputs = []} = JSON.parse(new TextDecoder().decode(body.subarray(0, at)))
	for (const output of outputs) {
		const size = output.parameters?.binary_data_size
		output.values = size === undefined ? [output.data].flat(Infinity) : decode(body.slice(at, (at += size)), output.datatype)
	}
	return outputs
}

export function textOf(value) {
	if (typeof value === "string") return value
	try {
		return new TextDecoder("utf-8", {fatal: true}).decode(value)
	} catch {
		return `base64:${btoa(Array.from(value, byte => String.fromCharCode(byte)).join(""))}`
	}
}

export function nested(values, shape, literal, from = 0, count = values.length) {
	if (!shape.length) return literal(values[from])
	const step = count / shape[0] || 0
	return `[${Array.from({length: shape[0]}, (_, at) => nested(values, shape.slice(1), literal, from + at * step, step)).join(", ")}]`
}
