/** The same request as code: curl, Python with shmserve, and Python with tritonclient. */

import { hasToken } from "../access.js";
import { SCALES } from "./image.js";
import { isFloat, nested, product, textOf } from "./tensors.js";

const MOST_JSON = 4096;
const TRITON = { sequence_id: "sequence_id", sequence_start: "sequence_start", sequence_end: "sequence_end", priority: "priority", timeout: "timeout" };
const OWN = { ...TRITON, sequence_id: "sequence", timeout: "" };

const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const json = (value) => (value instanceof Uint8Array || typeof value === "string" ? JSON.stringify(textOf(value)) : String(value));

function python(value) {
	if (typeof value === "boolean") return value ? "True" : "False";
	return typeof value === "number" && !Number.isFinite(value) ? `float("${value}")` : value === null ? "None" : json(value);
}

export const path = ({ model, version }, action) => `/v2/models/${encodeURIComponent(model)}${version && `/versions/${version}`}/${action}`;

/** The expression for an input in Python. */
function array({ datatype, shape, values, fill, files, image }) {
	const names = { BOOL: "bool", BYTES: "object", BF16: "ml_dtypes.bfloat16" };
	const type = names[datatype] ?? `np.${datatype.toLowerCase().replace("fp", "float")}`;
	const size = `(${shape.join(", ")}${shape.length === 1 ? "," : ""})`;
	const wanted = `.astype(${type}).reshape${size}`;
	if (image) {
		const { width, height, crop, scale, bgr, layout } = image;
		const mode = { 1: "L", 3: "RGB", 4: "RGBA" }[layout.channels];
		const pixels = `np.asarray(ImageOps.fit(Image.open(${json(files[0])}).convert("${mode}"), (${width}, ${height})), np.float32)`
			.replace(/ImageOps.fit\((.*"\)), /, crop ? "ImageOps.fit($1, " : "$1.resize(") + (bgr ? "[..., ::-1]" : "");
		const turn = layout.planes && layout.channels > 1 ? ".transpose(2, 0, 1)" : "";
		return `(${SCALES[scale][1].replace("pixels", pixels)})${turn}${wanted}`;
	}
	if (files) return `np.array([${files.map((file) => `open(${json(file)}, "rb").read()`).join(", ")}], object).reshape${size}`;
	if (fill === "random") return `np.random.${isFloat(datatype) ? `random(${size})` : `randint(0, ${datatype === "BOOL" ? 2 : 100}, ${size})`}${wanted}`;
	if (fill) return fill === "range" ? `np.arange(${product(shape)})${wanted}` : `np.${fill}(${size}, ${type})`;
	return `np.array(${nested(values, shape, python)}, ${type})`;
}

/** Arguments for the parameters: those that a client knows, and the others as a dict. */
function options(parameters, known) {
	const [own, rest] = [[], []];
	for (const [name, value] of Object.entries(parameters)) {
		if (known[name]) own.push(`${known[name]}=${python(value)}`);
		else rest.push(`${json(name)}: ${python(value)}`);
	}
	return rest.length ? [...own, `parameters={${rest.join(", ")}}`] : own;
}

function imports(inputs, last) {
	const text = inputs.map(array).join();
	return [text.includes("ml_dtypes") && "import ml_dtypes", "import numpy as np", text.includes("Image") && "from PIL import Image, ImageOps",
		`import ${last}`, ""].filter((line) => line !== false);
}

function ownCode({ model, version, inputs, outputs, parameters, stream }) {
	const classes = outputs.map(({ name, classes: k }) => `${json(name)}: ${k ? `shmserve.TopK(${k})` : "None"}`).join(", ");
	const args = [json(model), "inputs", version && `version=${version}`, classes.includes("TopK") && `outputs={${classes}}`,
		...options(parameters, OWN)].filter(Boolean).join(", ");
	return [...imports(inputs, "shmserve"), "inputs = {", ...inputs.map((input) => `    ${json(input.name)}: ${array(input)},`), "}",
		"with shmserve.Client() as client:", ...(stream ? [`    for result in client.stream(${args}):`, "        print(result)"]
			: [`    print(client.infer(${args}))`])];
}

function tritonCode({ model, version, inputs, outputs, parameters }) {
	const args = [json(model), "inputs", version && `model_version="${version}"`, "outputs=outputs", ...options(parameters, TRITON),
		hasToken() && 'headers={"Authorization": "Bearer TOKEN"}'].filter(Boolean).join(", ");
	const secure = location.protocol === "https:" ? ", ssl=True" : "";
	return [...imports(inputs, "tritonclient.http as triton"), "inputs = []", ...inputs.flatMap((input) => [`array = ${array(input)}`,
		`inputs.append(triton.InferInput(${json(input.name)}, array.shape, "${input.datatype}"))`, "inputs[-1].set_data_from_numpy(array)"]),
	"outputs = [", ...outputs.map(({ name, classes }) => `    triton.InferRequestedOutput(${json(name)}${classes ? `, class_count=${classes}` : ""}),`), "]",
	`client = triton.InferenceServerClient("${location.host}"${secure})`, `result = client.infer(${args})`,
	...outputs.map(({ name }) => `print(result.as_numpy(${json(name)}))`)];
}

/** Whether the request fits into a command line as JSON. */
export const fitsJson = ({ inputs }) => inputs.every(({ datatype, values, files }) => !files && !/^B?FP?16/.test(datatype) && values.length <= MOST_JSON);

function jsonRequest({ inputs, outputs, parameters }) {
	const tensors = inputs.map(({ name, shape, datatype, values }) =>
		`{"name": ${json(name)}, "shape": [${shape}], "datatype": "${datatype}", "data": ${nested(values, shape, json)}}`);
	const wanted = outputs.map(({ name, classes }) => `{"name": ${json(name)}${classes ? `, "parameters": {"classification": ${classes}}` : ""}}`);
	return `{"inputs": [${tensors.join(", ")}], "outputs": [${wanted.join(", ")}], "parameters": ${JSON.stringify(parameters)}}`;
}

/** The body of a request to `generate_stream`. */
export function generateRequest({ inputs, parameters }) {
	const values = inputs.map(({ name, values: all }) => `${json(name)}: ${all.length === 1 ? json(all[0]) : `[${all.map(json).join(", ")}]`}`);
	return `{${[...values, ...Object.entries(parameters).map(([name, value]) => `${json(name)}: ${JSON.stringify(value)}`)].join(", ")}}`;
}

function curl(call, length) {
	const token = hasToken() && "-H 'Authorization: Bearer TOKEN'";
	const body = call.stream ? `-d ${shell(generateRequest(call))}` : fitsJson(call) ? `-d ${shell(jsonRequest(call))}`
		: `-H 'Inference-Header-Content-Length: ${length}' --data-binary @request.bin`;
	const url = location.origin + path(call, call.stream ? "generate_stream" : "infer");
	return [`curl ${call.stream ? "-N " : ""}${shell(url)}`, token, body].filter(Boolean).join(" \\\n  ");
}

/** `call`: {model, version, inputs, outputs, parameters, stream}; `length`: of the JSON part of its binary form. */
export function code(call, length) {
	const triton = call.stream ? "# tritonclient.http has no streams; tritonclient.grpc has" : tritonCode(call).join("\n");
	return { curl: curl(call, length), python: ownCode(call).join("\n"), tritonclient: triton };
}
