/** The endpoints, from the server's OpenAPI document, each with a form to call it. */

import {call} from "../access.js"
import {codePanel, h, set, show, table, write} from "../dom.js"
import {DOCUMENT} from "./api.js"
import {curl} from "../try/openai.js"

const JSON_TYPE = "application/json"
const DEPTH = 3
const SHOWN = 100_000

/** The schemas of a document, in which references are followed. */
function reader({components}) {
	const follow = schema => (schema.$ref ? follow(components.schemas[schema.$ref.split("/").at(-1)]) : schema)

	function type(schema) {
		const {type: own, items, anyOf, enum: values} = follow(schema)
		if (values) return values.map(value => JSON.stringify(value)).join(" or ")
		if (anyOf) return anyOf.map(type).join(" or ")
		return items ? `list of ${type(items)}` : [own ?? "any"].flat().join(" or ")
	}

	function limits(schema) {
		const {minimum, maximum, minLength, maxLength, maxItems, pattern} = follow(schema)
		return [minimum != null && `at least ${minimum}`, maximum != null && `at most ${maximum}`, minLength && `not empty`,
			maxLength && `up to ${maxLength} characters`, maxItems && `up to ${maxItems} elements`, pattern].filter(Boolean).join(", ")
	}

	function rows(schema, prefix = "", depth = 0) {
		const {properties = {}, required = [], items} = follow(schema)
		if (items) return rows(items, `${prefix.replace(/\.$/, "")}[].`, depth)
		return Object.entries(properties).flatMap(([name, one]) => [
			[`${prefix}${name}`, type(one), required.includes(name) ? "yes" : "", limits(one)],
			...depth < DEPTH ? rows(one, `${prefix}${name}.`, depth + 1) : []])
	}

	function example(schema, depth = 0) {
		const {type: own, items, anyOf, properties = {}, required = [], enum: values, minimum = 0} = follow(schema)
		if (values) return values[0]
		if (anyOf) return example(anyOf[0], depth)
		const kind = [own].flat()[0]
		if (kind === "array") return items && depth < DEPTH ? [example(items, depth + 1)] : []
		if (kind === "object") return Object.fromEntries(required.map(name => [name, example(properties[name], depth + 1)]))
		return {string: "", boolean: false, integer: Math.max(minimum, 1), number: minimum}[kind] ?? null
	}
	return {rows, example}
}

function form(method, path, {parameters, requestBody}, schemas) {
	const places = parameters.filter(one => one.in === "path").map(({name}) => [name, h("input", {name, required: true, autocomplete: "off"})])
	const schema = requestBody?.content[JSON_TYPE]?.schema
	const body = schema && h("textarea", {rows: 6, spellcheck: "false", label: `Body of ${path}`}, JSON.stringify(schemas.example(schema), null, 2))
	const fields = schema ? schemas.rows(schema) : []
	const status = h("span.hint", {role: "status"})
	const result = h("pre", {"data-answer": path, tabindex: 0, role: "region", label: `Response of ${path}`})
	const code = codePanel("curl", "", "curl")
	const url = () => path.replace(/{(\w+)}/g, (_, name) => encodeURIComponent(places.find(([known]) => known === name)[1].value))
	const writeCode = () => write(code.lastChild, curl(method, url(), body?.value))

	async function submit(event) {
		event.preventDefault()
		write(result, "")
		show(result, true)
		write(status, "running …")
		try {
			const answer = await call(method, url(), body?.value)
			const pieces = answer.body.pipeThrough(new TextDecoderStream()).getReader()
			for (;;) {
				const {done, value} = await pieces.read()
				if (done) break
				if (result.textContent.length < SHOWN) result.append(value)
			}
			set(status, "role", "status")
			write(status, `status ${answer.status}`)
			if (answer.headers.get("Content-Type")?.startsWith(JSON_TYPE) && result.textContent.length < SHOWN) {
				write(result, JSON.stringify(JSON.parse(result.textContent), null, 2))
			}
		} catch (error) {
			set(status, "role", "alert")
			write(status, `${error.status ? `status ${error.status}: ` : ""}${error.message}`)
		}
	}

	writeCode()
	show(result, false)
	return h("form", {onsubmit: submit, oninput: writeCode}, places.map(([name, input]) => h("label", `${name} `, input)), body,
		h("p", h("button", {type: "submit"}, "Send"), " ", status), result, code,
		fields.length > 0 && h("details", h("summary", "Fields of the body"), table("Fields", ["Field", "Type", "Required", ""], fields)))
}

function operation(method, path, described, schemas) {
	const node = h("details.panel", {"data-operation": `${method} ${path}`, ontoggle: () => node.lastChild.firstChild
		|| node.lastChild.append(form(method, path, described, schemas))},
	h("summary", h("b", method), " ", h("code", path), " ", h("span.soft", described.summary)), h("div"))
	return node
}

/** The endpoints in groups, as elements. */
export async function operations() {
	const api = await call("GET", DOCUMENT).then(answer => answer.json())
	const schemas = reader(api)
	const groups = new Map()
	for (const [path, methods] of Object.entries(api.paths)) {
		for (const [method, described] of Object.entries(methods)) {
			const [tag] = described.tags
			groups.set(tag, [...groups.get(tag) ?? [], operation(method.toUpperCase(), path, described, schemas)])
		}
	}
	return [...groups].map(([tag, all]) => h("section.operations", h("h2", tag), all))
}
