/** The same request as code: curl, Python with shmserve, and Python with tritonclient. */

import {hasToken} from "../access.js"
import {modelPath} from "../route.js"
import {SCALES} from "./image.js"
import {shell} from "./openai.js"
import {isFloat, nested, textOf} from "./tensors.js"

const MAX_JSON = 4096
const KNOWN = /^(sequence_(id|start|end)|priority)$/

const json = value => (value instanceof Uint8Array || typeof value === "string" ? JSON.stringify(textOf(value)) : `${value}`)
const list = (...parts) => parts.flat().filter(Boolean).join(", ")
const lines = (...parts) => parts.flat(2).filter(part => part !== false).join("\n")

function python(value) {
	if (typeof value === "boolean") return value ? "True" : "False"
	return typeof value === "number" && !Number.isFinite(value) ? `float("${value}")` : json(value)
}

export const path = ({model, version}, action) => modelPath("/v2/models", model, version, action)

function array({datatype, shape, values, random, files, image}) {
	const names = {BOOL: "bool", BYTES: "object", BF16: "ml_dtypes.bfloat16"}
	const type = names[datatype] ?? `np.${datatype.toLowerCase().replace("fp", "float")}`
	const size = `(${shape.join(", ")}${shape.length === 1 ? "," : ""})`
	const cast = `.astype(${type}).reshape${size}`
	if (image) {
		const {width, height, scale, layout} = image
		const opened = `Image.open(${json(files[0])}).convert("${{1: "L", 3: "RGB", 4: "RGBA"}[layout.channels]}")`
		const scaled = SCALES[scale][1].replace("pixels", `np.asarray(${opened}.resize((${width}, ${height})), np.float32)`)
		return `(${scaled})${layout.planes && layout.channels > 1 ? ".transpose(2, 0, 1)" : ""}${cast}`
	}
	if (files) return `np.array([${list(files.map(file => `open(${json(file)}, "rb").read()`))}], object).reshape${size}`
	if (random) return `np.random.${isFloat(datatype) ? `random(${size})` : `randint(0, ${datatype === "BOOL" ? 2 : 100}, ${size})`}${cast}`
	return `np.array(${nested(values, shape, python)}, ${type})`
}

function options(parameters) {
	const all = Object.entries(parameters)
	const rest = list(all.map(([name, value]) => !KNOWN.test(name) && `${json(name)}: ${python(value)}`))
	return [...all.map(([name, value]) => KNOWN.test(name) && `${name}=${python(value)}`), rest && `parameters={${rest}}`]
}

function imports(inputs, last) {
	const text = inputs.map(array).join()
	return [text.includes("ml_dtypes") && "import ml_dtypes", "import numpy as np", text.includes("Image") && "from PIL import Image", `import ${last}`, ""]
}

function ownCode({model, version, inputs, outputs, parameters, stream}) {
	const classes = list(outputs.map(({name, classes: k}) => `${json(name)}: ${k ? `shmserve.TopK(${k})` : "None"}`))
	const args = list(json(model), "inputs", version && `version=${version}`, classes.includes("TopK(") && `outputs={${classes}}`, options(parameters)).replace(" sequence_id=", " sequence=")
	return lines(imports(inputs, "shmserve"), "inputs = {", inputs.map(input => `    ${json(input.name)}: ${array(input)},`), "}",
		"with shmserve.Client() as client:", stream ? `    for result in client.stream(${args}):\n        print(result)` : `    print(client.infer(${args}))`)
}

function tritonCode({model, version, inputs, outputs, parameters, stream, grpcPort}) {
	const header = hasToken() && `headers={"${stream ? "a" : "A"}uthorization": "Bearer TOKEN"}`
	const wanted = outputs.map(({name, classes}) => `triton.InferRequestedOutput(${list(json(name), classes && `class_count=${classes}`)})`)
	const args = list(json(model), "inputs", version && `model_version="${version}"`, `outputs=[${list(wanted)}]`, options(parameters))
	const host = stream ? `${location.hostname}:${grpcPort}` : location.host
	const shown = outputs.map(({name}) => `result.as_numpy(${json(name)})`)
	return lines(imports(inputs, `tritonclient.${stream ? "grpc" : "http"} as triton`), "inputs = []",
		inputs.flatMap(input => [`array = ${array(input)}`,
			`inputs.append(triton.InferInput(${json(input.name)}, array.shape, "${input.datatype}"))`, "inputs[-1].set_data_from_numpy(array)"]),
		`client = triton.InferenceServerClient(${list(json(host), location.protocol === "https:" && "ssl=True")})`,
		stream ? ["def answer(result, error):", shown.map(one => `    print(error or ${one})`),
			`client.start_stream(${list("answer", header)})`, `client.async_stream_infer(${args})`, "client.stop_stream()  # waits for the answers"]
			: [`result = client.infer(${list(args, header)})`, shown.map(one => `print(${one})`)])
}

export const fitsJson = ({inputs}) => inputs.every(({datatype, values, files}) => !files && !/^B?FP?16/.test(datatype) && values.length <= MAX_JSON)

export function generateRequest({inputs, parameters}) {
	const values = inputs.map(({name, values: all}) => `${json(name)}: ${all.length === 1 ? json(all[0]) : `[${list(all.map(json))}]`}`)
	return `{${list(values, JSON.stringify(parameters).slice(1, -1))}}`
}

function jsonRequest({inputs, outputs, parameters}) {
	const tensors = inputs.map(({name, shape, datatype, values}) =>
		`{"name": ${json(name)}, "shape": [${shape}], "datatype": "${datatype}", "data": ${nested(values, shape, json)}}`)
	const wanted = outputs.map(({name, classes}) => ({name, parameters: {classification: classes || undefined}}))
	return `{"inputs": [${list(tensors)}], "outputs": ${JSON.stringify(wanted)}, "parameters": ${JSON.stringify(parameters)}}`
}

function curl(call, length) {
	const body = call.stream ? `-d ${shell(generateRequest(call))}` : fitsJson(call) ? `-d ${shell(jsonRequest(call))}`
		: `-H 'Inference-Header-Content-Length: ${length}' --data-binary @request.bin`
	return [`curl -N ${shell(location.origin + path(call, call.stream ? "generate_stream" : "infer"))}`,
		hasToken() && "-H 'Authorization: Bearer TOKEN'", body].filter(Boolean).join(" \\\n  ")
}

export const code = (call, length) => ({
	curl: curl(call, length),
	python: ownCode(call),
	tritonclient: tritonCode(call),
})
