/** A form made from a model's metadata, and the answer to what it sends. */

import { call } from "../access.js";
import { button, codePanel, h, set, show, write } from "../dom.js";
import { bytes as size, duration } from "../format.js";
import { read } from "../stream.js";
import { code, fitsJson, generateRequest, path } from "./code.js";
import { SCALES, imageLayout, imageShape, imageValues } from "./image.js";
import { result } from "./results.js";
import { FILLS, encode, fullShape, outputsOf, parse, product, request, rounded } from "./tensors.js";

const SEQUENCE = '{"sequence_id": 1, "sequence_start": true, "sequence_end": true}';

const select = (label, options) => h("select", { "aria-label": label }, options.map((option) => h("option", option)));
const side = (label, value) => h("input", { type: "number", min: 1, max: 4096, value: value > 0 ? value : 224, disabled: value > 0, "aria-label": label });

/** The field of an input. `read()`: {name, datatype, shape, values, bytes, fill, files, image}, or null if it is left out. */
function field({ name, datatype, shape }, { format, optional } = {}, changed) {
	const id = `in-${name}`;
	const isText = datatype === "BYTES";
	const layout = isText ? null : imageLayout(shape, format);
	const least = product(shape.map(Math.abs));
	const hint = [optional && "may be empty", isText ? least > 1 && "one per line, or a list in JSON" : least > 1 && `separated by commas, a list in JSON, or: ${Object.keys(FILLS).join(", ")}`];
	const text = h("textarea", { id, rows: isText ? 3 : least > 1 ? 2 : 1, "data-input": name, spellcheck: "false", "aria-describedby": `${id}-hint` },
		isText || optional ? "" : least > 16 ? "random" : least > 1 ? "zeros" : datatype === "BOOL" ? "false" : "0");
	const file = h("input.unseen", { type: "file", id: `${id}-file`, multiple: isText && least !== 1, onchange: () => take([...file.files]) });
	const chosen = h("span.hint");
	const remove = button("Remove", () => take([]), { hidden: true, "aria-label": `Remove the file for ${name}` });
	const canvas = h("canvas", { role: "img", "aria-label": `The picture for ${name}` });
	const [scale, fit, colours] = [select("Scale", Object.keys(SCALES)), select("Fit", ["stretch", "crop"]), select("Colours", ["RGB", "BGR"])];
	if (/INT/.test(datatype)) scale.value = "0 to 255";
	const [width, height] = [side("Width", layout?.width), side("Height", layout?.height)];
	const options = h("div.options", { hidden: true }, layout?.planes ? "NCHW" : "NHWC", width, "×", height, scale, fit, colours, canvas);
	let files = [];
	let last = {};

	function take(list) {
		files = list.slice(0, file.multiple ? list.length : 1);
		if (!files.length) file.value = "";
		text.disabled = files.length > 0;
		write(chosen, files.map((one) => `${one.name}, ${size(one.size)}`).join("; ") || "or drop it here");
		show(remove, files.length);
		show(options, layout && files[0]?.type.startsWith("image/"));
		last = {};
		changed();
	}

	async function fromFiles() {
		if (isText) {
			const values = await Promise.all(files.map(async (one) => new Uint8Array(await one.arrayBuffer())));
			return { values, shape: fullShape(shape, values.length) };
		}
		if (options.hidden) return { ...parse(await files[0].text(), datatype, shape), files: undefined };
		const image = { width: width.valueAsNumber, height: height.valueAsNumber, crop: fit.value === "crop", scale: scale.value, bgr: colours.value === "BGR", layout };
		if (!(image.width > 0 && image.height > 0)) throw new Error("the picture needs a width and a height");
		return { values: rounded(await imageValues(files[0], layout, image, canvas), datatype), shape: imageShape(shape, layout, image), image };
	}

	/** The same tensor as last time, unless something was changed. */
	async function readField() {
		const key = [text, width, height, scale, fit, colours].map(({ value }) => value).join("\n");
		if (last.key === key) return last.found;
		if (optional && !files.length && !text.value.trim()) return null;
		try {
			const found = files.length ? { files: files.map((one) => one.name), ...(await fromFiles()) } : parse(text.value, datatype, shape);
			last = { key, found: { ...found, name, datatype, bytes: encode(found.values, datatype) } };
			set(text, "aria-invalid", null);
			return last.found;
		} catch (error) {
			set(text, "aria-invalid", true);
			throw new Error(`${name}: ${error.message}`);
		}
	}

	const node = h("fieldset.panel", { ondragover: (event) => event.preventDefault(), ondrop: (event) => {
		event.preventDefault();
		take([...event.dataTransfer.files]);
	} }, h("label", { for: id }, h("b", name), h("span.soft", ` ${datatype} [${shape.join(", ")}]`)), text,
	h("p.hint", { id: `${id}-hint` }, hint.filter(Boolean).join("; ")),
	h("p", file, h("label.button", { for: file.id }, layout ? "Choose a picture" : "Choose a file"), " ", chosen, remove), options);
	take([]);
	return { node, read: readField };
}

/** `detail`: the answer of /page/model. */
export function tryForm({ name: model, metadata, config, labels = [] }, version) {
	let timer = 0;
	let running = null;
	const stream = Boolean(config.model_transaction_policy?.decoupled);
	const fields = metadata.inputs.map((input) => field(input, config.input?.find(({ name }) => name === input.name), () => writeSoon()));
	const outputs = metadata.outputs.map(({ name }) =>
		({ name, top: !stream && labels.includes(name) && h("input", { type: "number", min: 0, max: 1000, value: 5, "aria-label": `Classes of ${name}` }) }));
	const parameters = h("textarea", { rows: 1, spellcheck: "false", "aria-label": "Parameters" }, config.sequence_batching ? SEQUENCE : "{}");
	const run = h("button", { type: "submit" }, "Run");
	const status = h("span.hint", { role: "status" });
	const answer = h("div.panels", { id: "result", "aria-live": "polite" });
	const panels = { curl: "curl", python: "Python", tritonclient: "Python with tritonclient" };
	for (const name of Object.keys(panels)) panels[name] = codePanel(panels[name], "", name);
	const save = h("a.button", { download: "request.bin", hidden: true }, "Save request.bin for curl");
	const form = h("form", { id: "try", onsubmit: submit, oninput: () => writeSoon(), onkeydown: (event) => {
		if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
	} }, fields.map(({ node }) => node), outputs.filter(({ top }) => top).map(({ name, top }) => h("label", h("b", name), " best classes (0: all values) ", top)),
	h("details", h("summary", "Parameters"), parameters), h("p", run, " ", status));

	async function collect() {
		const inputs = (await Promise.all(fields.map((one) => one.read()))).filter(Boolean);
		return { model, version, stream, inputs, outputs: outputs.map(({ name, top }) => ({ name, classes: Number(top?.value ?? 0) })), parameters: JSON.parse(parameters.value || "{}") };
	}

	function writeSoon() {
		clearTimeout(timer);
		timer = setTimeout(writeCode, 150);
	}

	async function writeCode() {
		try {
			const wanted = await collect();
			const { body, length } = request(wanted);
			for (const [name, text] of Object.entries(code(wanted, length))) write(panels[name].lastChild, text);
			URL.revokeObjectURL(save.href);
			save.href = URL.createObjectURL(body);
			show(save, !stream && !fitsJson(wanted));
			write(status, "");
		} catch (error) {
			write(status, error.message);
		}
	}

	async function submit(event) {
		event.preventDefault();
		if (running) return running.abort(new Error("cancelled"));
		const { signal } = (running = new AbortController());
		write(run, "Cancel");
		write(status, "running …");
		try {
			const wanted = await collect();
			const began = performance.now();
			if (stream) {
				const list = h("ol.panel.wide", { "data-result": "json" });
				answer.replaceChildren(list);
				const sent = await call("POST", path(wanted, "generate_stream"), generateRequest(wanted), { "Content-Type": "application/json" }, signal);
				await read(sent, (_, text) => list.append(h("li", h("pre", text))));
			} else {
				const { body, length } = request(wanted);
				const headers = { "Inference-Header-Content-Length": String(length), "Content-Type": "application/octet-stream" };
				const found = await outputsOf(await call("POST", path(wanted, "infer"), body, headers, signal));
				answer.replaceChildren(...found.map((output) => result(output, wanted.outputs.find(({ name }) => name === output.name)?.classes > 0)));
			}
			write(status, `answered in ${duration((performance.now() - began) / 1000)}`);
		} catch (error) {
			write(status, "");
			answer.replaceChildren(h("p.problem.wide", { role: "alert", "data-result": "error" }, error.message));
		}
		running = null;
		write(run, "Run");
	}

	return h("div.trial", form, answer, save, h("div.panels.wide", Object.values(panels)));
}
