/** Elements. Invariant: text from the server becomes text nodes only, never markup. */

const builder = create => (what, ...parts) => {
	const [tag, ...classes] = what.split(".")
	const node = create(tag)
	if (tag === "button") node.type = "button"
	if (classes.length) set(node, "class", classes.join(" "))
	const properties = parts[0]?.constructor === Object ? parts.shift() : {}
	for (const [name, value] of Object.entries(properties)) {
		if (name.startsWith("on")) node.addEventListener(name.slice(2), value)
		else set(node, name === "label" ? "aria-label" : name, value)
	}
	node.append(...parts.flat(2).filter(part => part != null && part !== false))
	return node
}

/** An element: h("tag.class", {attributes, listeners and `label` for screen readers}, ...children). */
export const h = builder(tag => document.createElement(tag))
export const s = builder(tag => document.createElementNS("http://www.w3.org/2000/svg", tag))

export const button = (text, onclick, more) => h("button.quiet", {onclick, ...more}, text)
export const find = id => document.getElementById(id)

export function set(node, name, value) {
	if (value == null || value === false) node.removeAttribute(name)
	else if (node.getAttribute(name) !== `${value}`) node.setAttribute(name, value)
}

/** Replaces a text if it is another: an unchanged text causes no layout and no announcement. */
export function write(node, text) {
	if (node.textContent !== text) node.textContent = text
}

export function show(node, shown) {
	node.hidden = !shown
}

/** Replaces the children, unless what they are made from is the same as last time. */
export function refill(node, source, make) {
	const key = JSON.stringify(source)
	if (node.madeFrom !== key) node.replaceChildren(...[make()].flat().filter(Boolean))
	node.madeFrom = key
}

export const panel = (title, kind, ...children) => h(`section.panel.${kind}`, h("h2", `${title} `, h("span.hint")), children)

/** A table. Heads that begin with "#" are those of numbers. */
export function table(label, heads, rows) {
	const row = (tag, cells) => h("tr", cells.map((cell, at) => h(heads[at][0] === "#" ? `${tag}.number` : tag, cell)))
	return h("div.scroll", {tabindex: 0, role: "region", label}, h("table", {label}, h("thead", row("th", heads.map(head => head.replace("#", "")))),
		h("tbody", rows.map(cells => row("td", cells)))))
}

export function facts(node, rows) {
	refill(node, rows, () => rows.filter(Boolean).map(([name, value, title]) => h("div", {title}, h("dt", name), h("dd", value))))
}

/** A text with a button that copies it. `name`: for data-copy and data-code. */
export function codePanel(title, text, name) {
	const pre = h("pre", {tabindex: 0, role: "region", "data-code": name, label: title}, text)
	const copy = button("Copy", async () => {
		getSelection().selectAllChildren(pre)
		const done = await navigator.clipboard?.writeText(pre.textContent).then(() => true, () => false)
		write(copy, done ? "Copied" : "Press Ctrl+C")
	}, {"data-copy": name, label: `Copy ${title}`})
	return panel(title, "wide.code", copy, pre)
}
