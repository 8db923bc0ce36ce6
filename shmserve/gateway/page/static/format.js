/** Values as short texts, in the units of `shmserve top`. */

export const NOTHING = "–"

const whole = new Intl.NumberFormat("en", {maximumFractionDigits: 0})
const known = text => value => (value == null || Number.isNaN(value) ? NOTHING : text(value))

function short(value, units, step) {
	let at = 0
	for (; Math.abs(value) >= 999.5 && at < units.length - 1; at += 1) value /= step
	return `${value.toFixed(at === 0 || Math.abs(value) >= 99.95 ? 0 : 1)} ${units[at]}`.trim()
}

export const count = known(value =>
	Math.abs(value) < 99_999.5 ? whole.format(value) : short(value, ["", "k", "M", "G", "T"], 1000))

export const rate = known(value => {
	if (value === 0) return "0"
	return value < 9.995 ? value.toFixed(2) : value < 999.95 ? value.toFixed(1) : count(value)
})

export const bytes = known(value => short(value, ["B", "KiB", "MiB", "GiB", "TiB"], 1024))

export const share = known(value => `${Math.round(value * 100)} %`)

export const duration = known(seconds => {
	if (seconds < 999.5e-6) return `${(seconds * 1e6).toFixed(0)} µs`
	for (const [unit, value, end] of [["ms", seconds * 1e3, 999.5], ["s", seconds, 99.95]]) {
		if (value < end) return `${value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0)} ${unit}`
	}
	const minutes = Math.floor(seconds / 60)
	const hours = Math.floor(minutes / 60)
	if (!hours) return `${minutes} min`
	return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`
})

export const clock = seconds => new Date(seconds * 1000).toLocaleString("sv")

export function element(value) {
	if (typeof value !== "number" || Number.isInteger(value)) return String(value)
	const size = Math.abs(value)
	return size >= 1e-4 && size < 1e7 ? String(Number(value.toPrecision(6))) : value.toExponential(2)
}

export const plural = (number, noun) => `${count(number)} ${noun}${Number(number) === 1 ? "" : "s"}`
