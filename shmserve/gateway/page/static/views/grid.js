/** A table of which only the rows in sight are drawn, so its cost does not depend on the number of models. */

import {h, set, show, write} from "../dom.js"

const BEYOND = 6
const names = new Intl.Collator("en", {numeric: true}).compare

/** `kind`: of the items. `columns`: {id, title, kind, value(item), cell(link)}; `cell` returns {node, update(item)}, in the first column with the
 * link. `href(item)`: of the link. `sorted`: {id, down}, which the caller keeps. */
export class Grid {
	constructor(kind, columns, sorted, href) {
		Object.assign(this, {attribute: `data-${kind}`, columns, sorted, href, items: [], rows: [], active: null})
		this.above = h("td")
		this.below = h("td")
		this.heads = h("tr", {"aria-rowindex": 1}, columns.map(({id, title, kind}) => h(`th.${id}.${kind}`, h("button", {onclick: () => {
			sorted.down = sorted.id === id ? !sorted.down : kind === "number"
			sorted.id = id
			this.update(this.items, "", true)
		}}, title))))
		this.last = h("tr", {"aria-hidden": "true"}, this.below)
		this.body = h("tbody", {onkeydown: event => this.#key(event), onclick: ({target}) => target.closest("a") || this.#rowOf(target)?.link.click(),
			onfocusin: ({target}) => this.#activate(this.#rowOf(target))}, h("tr", {"aria-hidden": "true"}, this.above), this.last)
		this.table = h("table.models", {label: `${kind[0].toUpperCase()}${kind.slice(1)}s`}, h("thead", this.heads), this.body)
		this.empty = h("p.empty")
		this.node = h("div.panel.grid", this.table, this.empty)
		this.stop = new AbortController()
		for (const event of ["scroll", "resize"]) window.addEventListener(event, () => this.draw(), {passive: true, signal: this.stop.signal})
	}

	/** Shows these items. While the pointer or the focus is on a row, rows keep their order unless `resort`. */
	update(items, emptyText, resort) {
		const held = !resort && (this.body.matches(":hover") || this.body.contains(document.activeElement))
		const added = new Set(items)
		this.items = held ? [...this.items.filter(item => added.delete(item)), ...added] : this.#ordered(items)
		write(this.empty, emptyText)
		show(this.empty, !items.length)
		set(this.table, "aria-rowcount", items.length + 1)
		const {id, down} = this.sorted
		this.columns.forEach((column, at) => set(this.heads.children[at], "aria-sort", column.id === id && (down ? "descending" : "ascending")))
		this.draw()
	}

	#ordered(items) {
		const {id, down} = this.sorted
		const {value} = this.columns.find(column => column.id === id)
		const keyed = items.map(item => [value(item) ?? NaN, item])
		keyed.sort(([one, a], [other, b]) => {
			const order = (down ? -1 : 1) * (typeof one === "string" ? names(one, other) : one - other)
			return Number.isNaN(one) - Number.isNaN(other) || order || names(a.name, b.name) || names(a.version, b.version) // NaN is last
		})
		return keyed.map(([, item]) => item)
	}

	draw() {
		const {items, rows} = this
		const height = rows[0]?.node.offsetHeight || 36
		const capacity = Math.ceil(window.innerHeight / height) + 2 * BEYOND
		const hidden = Math.floor(-this.table.getBoundingClientRect().top / height) - BEYOND
		const first = Math.max(0, Math.min(items.length - capacity, hidden))
		const shown = Math.min(items.length, capacity)
		const focused = this.body.contains(document.activeElement)
		while (rows.length < shown) rows.push(this.#row())
		while (rows.length > shown) rows.pop().node.remove()
		this.height = height
		this.above.style.height = `${first * height}px`
		this.below.style.height = `${(items.length - first - shown) * height}px`
		if (!items.includes(this.active)) this.active = items[0]
		rows.forEach((row, at) => {
			const item = row.item = items[first + at]
			set(row.node, "aria-rowindex", first + at + 2)
			set(row.node, this.attribute, item.name)
			set(row.link, "href", this.href(item))
			for (const cell of row.cells) cell.update(item)
		})
		this.#activate(rows.find(({item}) => item === this.active), focused)
	}

	#row() {
		const link = h("a")
		const cells = this.columns.map(column => column.cell(link))
		const node = h("tr", cells.map((cell, at) => h(`td.${this.columns[at].id}.${this.columns[at].kind}`, cell.node)))
		this.last.before(node)
		return {node, cells, link}
	}

	#rowOf(target) {
		return this.rows.find(({node}) => node.contains(target))
	}

	#activate(row, focus) {
		for (const one of this.rows) set(one.link, "tabindex", one === row || !row && one === this.rows[0] ? 0 : -1)
		if (row) this.active = row.item
		if (row && focus) row.link.focus({preventScroll: true})
	}

	#key(event) {
		const step = {ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity}[event.key]
		if (!step) return
		event.preventDefault()
		const at = Math.max(0, Math.min(this.items.length - 1, this.items.indexOf(this.active) + step))
		const y = this.table.getBoundingClientRect().top + (at + 1) * this.height
		const [low, high] = [3 * this.height, window.innerHeight - 3 * this.height]
		window.scrollBy(0, Math.min(0, y - low) + Math.max(0, y - high))
		this.active = this.items[at]
		this.draw()
	}
}
