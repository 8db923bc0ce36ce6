/** The addresses of the views: `#/`, `#/api` (also `/docs`), `#/servers`, `#/model/NAME[/versions/V][/try, /config or /logs]`. */

export function modelPath(base, model, version = "", part = "") {
	return `${base}/${encodeURIComponent(model)}${version && `/versions/${version}`}${part && `/${part}`}`
}

export const route = (...names) => modelPath("#/model", ...names)
export const SERVERS = "#/servers"

const PATTERN = /^#\/model\/([^/]+)(?:\/versions\/(\d+))?(?:\/(try|config|logs))?$/

export function place() {
	const [, name = "", version = "", part = ""] = location.hash.match(PATTERN) ?? []
	const api = location.hash === "#/api" || (location.pathname === "/docs" && !location.hash)
	return {model: decodeURIComponent(name), version, part, servers: location.hash === SERVERS, api}
}
