/** A table of which only the rows in sight are drawn, so its cost does not depend on the number of models. */

import { h, set, show, write } from "../dom.js";

const BEYOND = 6;
const names = new Intl.Collator("en", { numeric: true }).compare;

/** `columns`: {id, title, hint, kind, value(item), cell(link)}; `cell` returns {node, update(item)}, and that of the
 * first column contains the link. `href(item)`: of the link. `sorted`: {id, down}, which the caller keeps. */
export class Grid {
	constructor(label, columns, sorted, href) {
		Object.assign(this, { columns, sorted, href, items: [], rows: [], active: null });
		this.above = h("tr", { "aria-hidden": "true" }, h("td"));
		this.below = h("tr", { "aria-hidden": "true" }, h("td"));
		this.heads = columns.map((column) => this.#head(column));
		this.body = h("tbody", { onkeydown: (event) => this.#key(event), onclick: (event) => this.#click(event),
			onfocusin: (event) => this.#activate(this.#rowOf(event.target)) }, this.above, this.below);
		this.table = h("table.models", { "aria-label": label }, h("thead", h("tr", { "aria-rowindex": 1 }, this.heads)), this.body);
		this.empty = h("p.empty");
		this.node = h("div.panel.grid", this.table, this.empty);
		this.draw = this.draw.bind(this);
		window.addEventListener("scroll", this.draw, { passive: true });
		window.addEventListener("resize", this.draw);
	}

	close() {
		window.removeEventListener("scroll", this.draw);
		window.removeEventListener("resize", this.draw);
	}

	#head({ id, title, hint, kind }) {
		const { sorted } = this;
		return h(`th.${id}.${kind}`, { scope: "col" }, h("button", { type: "button", title: hint, onclick: () => {
			sorted.down = sorted.id === id ? !sorted.down : kind === "number";
			sorted.id = id;
			this.update(this.items, "", true);
		} }, title));
	}

	/** Shows these items. While the pointer or the focus is on a row, rows keep their order unless `resort`. */
	update(items, emptyText, resort = false) {
		const held = !resort && (this.body.matches(":hover") || this.body.contains(document.activeElement));
		const left = new Set(items);
		this.items = held ? [...this.items.filter((item) => left.delete(item)), ...left] : this.#ordered(items);
		write(this.empty, emptyText);
		show(this.empty, !items.length);
		set(this.table, "aria-rowcount", items.length + 1);
		const { id, down } = this.sorted;
		this.heads.forEach((head, at) =>
			set(head, "aria-sort", this.columns[at].id === id && (down ? "descending" : "ascending")));
		this.draw();
	}

	#ordered(items) {
		const { id, down } = this.sorted;
		const { value } = this.columns.find((column) => column.id === id);
		const keyed = items.map((item) => [value(item) ?? null, item]);
		keyed.sort(([one, a], [other, b]) => {
			let order = (one === null) - (other === null); // missing values are last in both directions
			if (!order && one !== null) order = (typeof one === "string" ? names(one, other) : one - other) * (down ? -1 : 1);
			return order || names(a.name, b.name) || names(a.version, b.version);
		});
		return keyed.map(([, item]) => item);
	}

	get #height() {
		return this.rows[0]?.node.offsetHeight || 36;
	}

	draw() {
		const { items, rows } = this;
		const height = this.#height;
		const top = this.table.getBoundingClientRect().top + this.heads[0].offsetHeight;
		const most = Math.ceil(window.innerHeight / height) + 2 * BEYOND;
		const first = Math.max(0, Math.min(items.length - most, Math.floor(-top / height) - BEYOND));
		const shown = Math.min(items.length, most);
		const focused = this.body.contains(document.activeElement);
		while (rows.length < shown) rows.push(this.#row());
		while (rows.length > shown) rows.pop().node.remove();
		this.above.firstChild.style.height = `${first * height}px`;
		this.below.firstChild.style.height = `${(items.length - first - shown) * height}px`;
		if (!items.includes(this.active)) this.active = items[0];
		rows.forEach((row, at) => this.#fill(row, items[first + at], first + at));
		if (focused) this.#activate(rows.find((row) => row.item === this.active), true);
	}

	#row() {
		const link = h("a");
		const cells = this.columns.map((column) => column.cell(link));
		const node = h("tr", cells.map((cell, at) => h(`td.${this.columns[at].id}.${this.columns[at].kind}`, cell.node)));
		this.below.before(node);
		return { node, cells, link };
	}

	#fill(row, item, index) {
		row.item = item;
		set(row.node, "aria-rowindex", index + 2);
		set(row.node, "data-model", item.name);
		set(row.link, "href", this.href(item));
		set(row.link, "tabindex", item === this.active ? 0 : -1);
		for (const cell of row.cells) cell.update(item);
	}

	#rowOf(target) {
		return this.rows.find(({ node }) => node.contains(target));
	}

	/** Makes a row the one that Tab reaches. */
	#activate(row, focus = false) {
		if (!row) return;
		this.active = row.item;
		for (const one of this.rows) set(one.link, "tabindex", one === row ? 0 : -1);
		if (focus) row.link.focus({ preventScroll: true });
	}

	#click(event) {
		if (!event.target.closest("a") && !getSelection().toString()) this.#rowOf(event.target)?.link.click();
	}

	#key(event) {
		const height = this.#height;
		const page = Math.max(1, Math.floor(window.innerHeight / height) - 4);
		const step = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }[event.key];
		if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
		event.preventDefault();
		const at = Math.max(0, Math.min(this.items.length - 1, this.items.indexOf(this.active) + step));
		const y = this.table.getBoundingClientRect().top + (at + 1) * height;
		const room = window.innerHeight - 3 * height;
		if (y < 3 * height) window.scrollBy(0, y - 3 * height);
		else if (y > room) window.scrollBy(0, y - room);
		this.active = this.items[at];
		this.draw();
	}
}
