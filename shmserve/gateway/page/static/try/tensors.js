/** Tensors: text to values, values to bytes and back, and the binary form of KServe's requests. */

const BITS = { BOOL: 8, BF16: 16 };
const METHODS = { BOOL: "Uint8", FP16: "Float16", FP32: "Float32", FP64: "Float64", INT64: "BigInt64", UINT64: "BigUint64" };
const MOST = 1 << 26;

export const isFloat = (dtype) => /^B?F/.test(dtype);
const isLong = (dtype) => /INT64/.test(dtype);
const sizeOf = (dtype) => (BITS[dtype] ?? Number(dtype.match(/\d+/)[0])) / 8;
export const product = (dims) => dims.reduce((result, size) => result * size, 1);

/** The values' shape: as they are nested, if that fits; otherwise unknown dimensions are 1, except for the last one. */
export function fullShape(dims, count, nested = []) {
	if (nested.length === dims.length && dims.every((size, at) => size === -1 || size === nested[at])) return nested;
	const known = product(dims.filter((size) => size !== -1));
	const last = dims.lastIndexOf(-1);
	const shape = dims.map((size, at) => (size !== -1 ? size : at === last ? count / known : 1));
	if (product(shape) === count && shape.every(Number.isInteger)) return shape;
	throw new Error(`expected ${last < 0 ? "" : "a multiple of "}${known} values for the shape [${dims.join(", ")}], got ${count}`);
}

function json(text) {
	try {
		return JSON.parse(text);
	} catch (error) {
		throw new Error(`not a list in JSON: ${error.message}`);
	}
}

/** Reads a list in JSON, words, lines, or one of FILLS. Returns {values, shape, fill}; 64-bit integers are BigInt. */
export function parse(text, dtype, dims) {
	const trimmed = text.trim();
	const least = dims.map(Math.abs);
	if (dtype !== "BYTES" && FILLS[trimmed]) return { ...filled(trimmed, dtype, least), fill: trimmed };
	let list;
	if (dtype === "BYTES") list = /^\[[^]*\]$/.test(trimmed) ? json(trimmed) : product(least) > 1 ? text.split("\n") : [text];
	else list = trimmed.includes("[") ? json(trimmed.replace(/[-+.\w]+/g, '"$&"')) : trimmed.split(/[\s,]+/).filter(Boolean);
	const nesting = [];
	for (let part = list; Array.isArray(part); part = part[0]) nesting.push(part.length);
	const values = [list].flat(Infinity).map((word) => (dtype === "BYTES" ? String(word) : number(String(word), dtype)));
	return { values, shape: fullShape(dims, values.length, nesting) };
}

function number(word, dtype) {
	if (isFloat(dtype)) {
		const value = Number(word.replace(/\b(inf|infinity)$/i, "Infinity"));
		if (Number.isNaN(value) && !/^nan$/i.test(word)) throw new Error(`'${word}' is not a number`);
		return value;
	}
	if (dtype === "BOOL" && /^(true|false|0|1)$/i.test(word)) return /^[t1]/i.test(word);
	if (dtype === "BOOL" || !/^[-+]?\d+$/.test(word)) throw new Error(`'${word}' is not ${dtype === "BOOL" ? "true or false" : "an integer"}`);
	const value = BigInt(word.replace("+", ""));
	const range = 1n << BigInt(sizeOf(dtype) * 8);
	const low = dtype[0] === "U" ? 0n : -range / 2n;
	if (value < low || value >= low + range) throw new Error(`${word} is not in the range of ${dtype}`);
	return isLong(dtype) ? value : Number(value);
}

export const FILLS = { zeros: () => 0, ones: () => 1, range: (at) => at, random: Math.random };

function filled(word, dtype, shape) {
	const length = product(shape);
	if (length > MOST) throw new Error(`${length} values are too many for this page`);
	const scale = isFloat(dtype) || word !== "random" ? 1 : dtype === "BOOL" ? 2 : 100;
	const cast = dtype === "BOOL" ? (value) => value >= 1 : isLong(dtype) ? (value) => BigInt(Math.floor(value)) : isFloat(dtype) ? Number : Math.floor;
	return { values: Array.from({ length }, (_, at) => cast(FILLS[word](at) * scale)), shape };
}

/** Rounds numbers for a data type. */
export function rounded(values, dtype) {
	return isFloat(dtype) ? values : Array.from(values, (value) => (isLong(dtype) ? BigInt(Math.round(value)) : Math.round(value)));
}

export function encode(values, dtype) {
	if (dtype === "BYTES") {
		const parts = values.map((value) => (typeof value === "string" ? new TextEncoder().encode(value) : value));
		const found = new Uint8Array(parts.reduce((sum, part) => sum + 4 + part.length, 0));
		let at = 0;
		for (const part of parts) {
			new DataView(found.buffer).setUint32(at, part.length, true);
			found.set(part, at + 4);
			at += 4 + part.length;
		}
		return found;
	}
	const view = new DataView(new ArrayBuffer(values.length * sizeOf(dtype)));
	const write = accessor(view, "set", dtype);
	for (let at = 0; at < values.length; at += 1) write(at * sizeOf(dtype), values[at]);
	return new Uint8Array(view.buffer);
}

function decode(bytes, dtype) {
	const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
	if (dtype === "BYTES") {
		const found = [];
		for (let at = 0; at < bytes.length; at += 4 + found.at(-1).length) found.push(bytes.subarray(at + 4, at + 4 + view.getUint32(at, true)));
		return found;
	}
	const size = sizeOf(dtype);
	const read = accessor(view, "get", dtype);
	return Array.from({ length: bytes.length / size }, (_, at) => (dtype === "BOOL" ? read(at) === 1 : read(at * size)));
}

/** Reads or writes an element at an offset. BF16 is the upper half of an FP32. */
function accessor(view, verb, dtype) {
	if (dtype === "BF16") {
		const float = new Float32Array(1);
		const bits = new Uint32Array(float.buffer);
		if (verb === "get") return (at) => ((bits[0] = view.getUint16(at, true) << 16), float[0]);
		return (at, value) => {
			float[0] = value;
			const even = 0x7fff + ((bits[0] >>> 16) & 1); // rounds to the nearest, ties to even
			view.setUint16(at, Number.isNaN(float[0]) ? 0x7fc0 : (bits[0] + even) >>> 16, true);
		};
	}
	const name = verb + (METHODS[dtype] ?? dtype.replace("INT", "int").replace(/^./, (first) => first.toUpperCase()));
	if (!view[name]) throw new Error(`this browser has no ${dtype} numbers`);
	return (at, ...value) => view[name](at, ...value, true);
}

/** {body, length}; `length`: of the JSON part, which the tensors follow. */
export function request({ inputs, outputs, parameters }) {
	const head = JSON.stringify({
		inputs: inputs.map(({ name, shape, datatype, bytes }) => ({ name, shape, datatype, parameters: { binary_data_size: bytes.length } })),
		outputs: outputs.map(({ name, classes }) => ({ name, parameters: { binary_data: true, classification: classes || undefined } })),
		parameters,
	});
	return { length: new TextEncoder().encode(head).length, body: new Blob([head, ...inputs.map(({ bytes }) => bytes)]) };
}

/** The outputs of a response, with `values`. */
export async function outputsOf(answer) {
	const body = new Uint8Array(await answer.arrayBuffer());
	let at = Number(answer.headers.get("Inference-Header-Content-Length") ?? body.length);
	const { outputs = [] } = JSON.parse(new TextDecoder().decode(body.subarray(0, at)));
	for (const output of outputs) {
		const size = output.parameters?.binary_data_size;
		output.values = size === undefined ? [output.data].flat(Infinity) : decode(body.subarray(at, (at += size)), output.datatype);
	}
	return outputs;
}

/** Bytes as text, or as base64 if they are not UTF-8. */
export function textOf(value) {
	if (typeof value === "string") return value;
	try {
		return new TextDecoder("utf-8", { fatal: true }).decode(value);
	} catch {
		return `base64:${btoa(Array.from(value, (byte) => String.fromCharCode(byte)).join(""))}`;
	}
}

/** Values as nested lists; `literal(value)`: the text of one. */
export function nested(values, shape, literal, from = 0, count = values.length) {
	if (!shape.length) return literal(values[from]);
	const step = count / shape[0] || 0;
	return `[${Array.from({ length: shape[0] }, (_, at) => nested(values, shape.slice(1), literal, from + at * step, step)).join(", ")}]`;
}
