/** A request to an OpenAI-compatible endpoint as code: {curl, python}. */

import {hasToken} from "../access.js"

export const shell = text => `'${text.replaceAll("'", "'\\''")}'`
const FIELDS = new Set(["model", "messages", "prompt", "temperature", "top_p", "max_tokens", "tools", "input", "dimensions", "seed", "stop", "n"])

/** A value of JSON as Python. */
function python(value) {
	if (value === null) return "None"
	if (typeof value === "boolean") return value ? "True" : "False"
	if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`
	if (typeof value !== "object") return JSON.stringify(value)
	return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${python(one)}`).join(", ")}}`
}

export const curl = (method, path, body) => [`curl${method === "GET" || body ? "" : ` -X ${method}`} ${shell(location.origin + path)}`,
	hasToken() && "-H 'Authorization: Bearer TOKEN'", body && `-d ${shell(body)}`].filter(Boolean).join(" \\\n  ")

function call(path, method, body, shown) {
	const fields = Object.fromEntries(Object.entries(body).filter(([, value]) => value !== undefined))
	const extra = Object.fromEntries(Object.entries(fields).filter(([name]) => !FIELDS.has(name)))
	const named = Object.entries(fields).filter(([name]) => FIELDS.has(name)).map(([name, value]) => `    ${name}=${python(value)},`)
	if (Object.keys(extra).length) named.push(`    extra_body=${python(extra)},`)
	return {
		curl: curl("POST", path, JSON.stringify(fields)),
		python: ["from openai import OpenAI", "", `client = OpenAI(base_url="${location.origin}/v1", api_key="${hasToken() ? "TOKEN" : "none"}")`,
			`answer = client.${method}(`, ...named, ")", `print(${shown})`].join("\n"),
	}
}

export const chatCode = (body, chats) => (chats
	? call("/v1/chat/completions", "chat.completions.create", body, "answer.choices[0].message")
	: call("/v1/completions", "completions.create", body, "answer.choices[0].text"))
export const embeddingsCode = body => call("/v1/embeddings", "embeddings.create", body, "[item.embedding for item in answer.data]")
