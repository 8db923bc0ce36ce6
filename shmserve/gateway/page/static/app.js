/** The page: connects the stream, the views, the notices and the keys. */

import { askToken, call, initAccess } from "./access.js";
import { button, find, h, set, show, write } from "./dom.js";
import { duration } from "./format.js";
import { place, route } from "./route.js";
import { Store } from "./store.js";
import { follow } from "./stream.js";
import { modelView } from "./views/model.js";
import { overview } from "./views/overview.js";

const NOTICES = 4;
const NOTICE_MS = 8000;
const store = new Store(notice);
let view = null;
let shown = "";
let lost = false;

/** Announces a change, for some seconds after the last time that it is announced. */
function notice(text, entry = null, bad = false) {
	const all = find("notices");
	const about = text.length > 240 ? `${text.slice(0, 240)}…` : text;
	let node = [...all.children].find((one) => one.firstChild.textContent === about);
	if (!node) {
		const body = entry ? h("a", { href: route(entry.name, entry.version) }, about) : h("span", about);
		node = h(`div.notice.${bad ? "bad" : "good"}`, { role: bad && "alert" }, body,
			button("×", () => node.remove(), { "aria-label": "Dismiss" }));
		all.append(node);
		if (all.children.length > NOTICES) all.firstChild.remove();
	}
	clearTimeout(node.timer);
	node.timer = setTimeout(() => node.remove(), NOTICE_MS);
}

function render() {
	const next = place();
	const key = `${next.model}/${next.version}`;
	if (!view || shown !== key) {
		const first = !view;
		view?.close();
		shown = key;
		view = next.model ? modelView(store, next) : overview(store);
		find("main").replaceChildren(...view.nodes.flat());
		window.scrollTo(0, 0);
		if (!first) find("main").querySelector("h1").focus({ preventScroll: true });
	}
	view.go(next);
}

function connected() {
	document.body.dataset.connection = "live";
	write(find("connection"), "live");
	show(find("banner"), false);
	if (lost) notice("Connected again");
	lost = false;
}

function disconnected({ message, status }) {
	const refused = status === 401 || status === 403;
	document.body.dataset.connection = "down";
	write(find("connection"), refused ? "refused" : "reconnecting");
	write(find("banner"), refused ? message : `Not connected: ${message}. ${store.now ? "What is shown is from before. " : ""}Trying again.`);
	show(find("banner"), true);
	if (refused) askToken(message);
	lost = true;
}

function take(name, document) {
	if (name === "down") return disconnected({ message: document.error });
	connected();
	store.take(name, document);
	const { server } = store;
	write(find("server"), `${server.name} ${server.version}`);
	write(find("ready"), server.ready ? "READY" : "NOT READY");
	set(find("ready"), "data-state", server.ready ? "READY" : "UNAVAILABLE");
	set(find("ready"), "title", `up for ${duration(server.uptime_seconds)}`);
}

function key(event) {
	if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
	if (event.target.matches("input, textarea, select")) return event.key === "Escape" && event.target.blur();
	const { model, version } = place();
	const actions = {
		o: () => (location.hash = "#/"),
		t: () => model && (location.hash = route(model, version, "try")),
		"/": () => {
			if (model) location.hash = "#/";
			setTimeout(() => document.querySelector("input[type=search]").focus());
		},
		"?": () => find("help-dialog").showModal(),
	};
	if (!actions[event.key]) return;
	event.preventDefault();
	actions[event.key]();
}

initAccess(follow((signal) => call("GET", "/page/events", undefined, {}, signal), take, disconnected));
find("help").onclick = () => find("help-dialog").showModal();
find("help-close").onclick = () => find("help-dialog").close();
find("skip").onclick = () => find("main").focus();
window.addEventListener("hashchange", render);
document.addEventListener("keydown", key);
render();
