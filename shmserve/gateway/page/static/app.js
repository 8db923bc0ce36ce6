/** The page: connects the stream, the views, the notices and the keys. */

import {askToken, call, initAccess} from "./access.js"
import {find, h, set, show, write} from "./dom.js"
import {duration} from "./format.js"
import {place, route} from "./route.js"
import {Store, stateOf} from "./store.js"
import {follow} from "./stream.js"
import {modelView} from "./views/model.js"
import {overview} from "./views/overview.js"

const NOTICES = 4
const NOTICE_MS = 8000
const store = new Store(notice)
let view = null
let shown = ""
let lost = false

function notice(text, entry = null, bad = false) {
	const all = find("notices")
	let node = [...all.children].find(one => one.textContent === text)
	if (!node) {
		node = h(`a.notice.${bad && "bad"}`, {role: bad && "alert", href: entry ? route(entry.name, entry.version) : "#/"}, text)
		all.append(node)
		if (all.children.length > NOTICES) all.firstChild.remove()
	}
	clearTimeout(node.timer)
	node.timer = setTimeout(() => node.remove(), NOTICE_MS)
}

function render() {
	const next = place()
	const key = `${next.model}/${next.version}`
	if (!view || shown !== key) {
		const first = !view
		view?.close()
		shown = key
		view = next.model ? modelView(store, next) : overview(store)
		find("main").replaceChildren(...view.nodes.flat())
		window.scrollTo(0, 0)
		if (!first) find("main").querySelector("h1").focus({preventScroll: true})
	}
	view.go(next)
}

function connected() {
	document.body.dataset.connection = "live"
	write(find("connection"), "live")
	show(find("banner"), false)
	if (lost) notice("Connected again")
	lost = false
}

function disconnected({message, status}) {
	const refused = status === 401 || status === 403
	document.body.dataset.connection = "down"
	write(find("connection"), refused ? "refused" : "reconnecting")
	write(find("banner"), refused ? message : `Not connected: ${message}. Trying again.`)
	show(find("banner"), true)
	if (refused) askToken(message)
	lost = true
}

function take(name, document) {
	if (name === "down") return disconnected({message: document.error})
	connected()
	store.take(name, document)
	const {server} = store
	write(find("server"), `${server.name} ${server.version}`)
	const state = stateOf(server)
	write(find("ready"), `${state}, up ${duration(server.uptime_seconds)}`)
	set(find("ready"), "data-state", state)
}

function key(event) {
	if (event.key !== "/" || event.target.matches("input, textarea, select")) return
	event.preventDefault()
	location.hash = "#/"
	setTimeout(() => document.querySelector("input[type=search]").focus())
}

initAccess(follow(signal => call("GET", "/page/events", undefined, {}, signal), take, disconnected))
window.addEventListener("hashchange", render)
document.addEventListener("keydown", key)
render()
