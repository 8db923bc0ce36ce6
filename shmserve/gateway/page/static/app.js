/** The page: connects the stream, the views, the notices and the keys. */

import {askToken, call, history, initAccess, isRefused, offerServers} from "./access.js"
import {find, h, set, show, write} from "./dom.js"
import {Fleet} from "./fleet.js"
import {duration} from "./format.js"
import {SERVERS, place, route} from "./route.js"
import {Store, stateOf} from "./store.js"
import {follow} from "./stream.js"
import {apiView} from "./views/api.js"
import {modelView} from "./views/model.js"
import {overview} from "./views/overview.js"
import {serversView} from "./views/servers.js"

const NOTICE_MS = 15_000
const store = new Store(notice)
const fleet = new Fleet(store, (text, bad) => notice(text, null, bad, SERVERS))
let view = null
let shown = ""
let lost = false

function notice(text, entry = null, bad = false, href = entry ? route(entry.name, entry.version) : "#/") {
	const node = h(`a.notice.${bad && "bad"}`, {role: bad && "alert", href, title: text}, text)
	find("notices").replaceChildren(node)
	setTimeout(() => node.remove(), NOTICE_MS)
}

function render() {
	const next = place()
	const key = `${next.api}/${next.servers}/${next.model}/${next.version}`
	if (!view || shown !== key) {
		const first = !view
		view?.close()
		shown = key
		view = next.api ? apiView() : next.servers ? serversView(fleet) : next.model ? modelView(store, next) : overview(store)
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

function disconnected(error) {
	const refused = isRefused(error)
	const {message} = error
	fleet.own.lost(error)
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
	if (name === "state") history().then(recorded => store.seed(recorded), ({message}) => notice(`No history: ${message}`, null, true))
	fleet.own.heard()
	if (document.servers && fleet.begin(document.servers)) offerServers(fleet.others)
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

fleet.own.connect = follow(signal => call("GET", "/page/events", undefined, {}, signal), take, disconnected)
initAccess(origin => fleet.connect(origin))
fleet.watch(() => {
	const [ready, all] = fleet.ready
	show(find("servers"), all > 1)
	write(find("servers").firstChild, `${ready} of ${all}`)
	set(find("servers"), "data-alarm", ready < all)
})
window.addEventListener("hashchange", render)
document.addEventListener("keydown", key)
render()
