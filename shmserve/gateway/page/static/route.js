/** The addresses of the views: `#/`, `#/model/NAME[/versions/V][/try or /config]`. */

export function route(model, version = "", part = "") {
	return `#/model/${encodeURIComponent(model)}${version && `/versions/${version}`}${part && `/${part}`}`;
}

const PATTERN = /^#\/model\/([^/]+)(?:\/versions\/(\d+))?(?:\/(try|config))?$/;

/** {model, version, part}; texts are empty where the address does not have them. */
export function place() {
	const [, name = "", version = "", part = ""] = location.hash.match(PATTERN) ?? [];
	try {
		return { model: decodeURIComponent(name), version, part };
	} catch {
		return { model: "", version, part }; // not an address that this page made
	}
}
