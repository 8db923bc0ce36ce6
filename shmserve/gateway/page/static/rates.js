/** Values over time: those that the server has recorded, continued with the events, and those since the page was opened. */

/** The seconds that `share` of all requests do not exceed, or null. Bucket k counts durations of 2^(k-1) to 2^k - 1 ns. */
export function quantile(buckets, share) {
	const ordered = Object.entries(buckets).map(([bucket, count]) => [Number(bucket), count])
	ordered.sort((one, other) => one[0] - other[0])
	const rank = share * ordered.reduce((sum, [, count]) => sum + count, 0)
	let below = 0
	for (const [bucket, count] of ordered) {
		if (count && below + count >= rank) {
			const low = bucket ? 2 ** (bucket - 1) : 0
			return (low + (2 ** bucket - 1 - low) * (rank - below) / count) / 1e9
		}
		below += count
	}
	return null
}

/** Adds counts to others. */
export function add(counts, others = {}) {
	for (const [key, count] of Object.entries(others)) counts[key] = (counts[key] ?? 0) + count
}

function more(before = {}, after = {}) {
	const grown = Object.entries(after).map(([key, count]) => [key, count - (before[key] ?? 0)])
	return Object.fromEntries(grown.filter(([, count]) => count > 0))
}

/** Means and counts between two states of counters; null if they were reset meanwhile. */
export function between(before, after) {
	const grown = name => (after[name] ?? 0) - (before[name] ?? 0)
	if (["success", "batches", "rows"].some(name => grown(name) < 0)) return null
	const answered = grown("success")
	const mean = name => (answered ? grown(name) / answered / 1e9 : null)
	return {
		answered,
		batch: grown("batches") ? grown("rows") / grown("batches") : null,
		reasons: more(before.reasons, after.reasons),
		sizes: more(before.batch_rows, after.batch_rows),
		queue: mean("queue_ns"),
		input: mean("input_ns"),
		infer: mean("infer_ns"),
		output: mean("output_ns"),
	}
}

const SECONDS = 300

/** The values of a few series in the last seconds; NaN is a missing one. `second`: that of the last value, on the clock of
 * the server. */
export class History {
	constructor(names) {
		this.second = 0
		this.series = Object.fromEntries(names.map(name => [name, new Float32Array(SECONDS).fill(NaN)]))
	}

	/** Sets the values of the `seconds` up to this one. Earlier ones that are missing stay so. */
	push(second, seconds, values) {
		const passed = Math.min(second - this.second, SECONDS)
		if (passed <= 0) return
		const covered = Math.min(passed, Math.max(1, Math.ceil(seconds)))
		for (const [name, series] of Object.entries(this.series)) {
			series.copyWithin(0, passed)
			series.fill(NaN, SECONDS - passed).fill(values[name] ?? NaN, SECONDS - covered)
		}
		this.second = second
	}

	/** Puts recorded values up to a second before the values that it has of later ones. */
	seed(second, recorded) {
		const later = Math.min(Math.max(0, this.second - second), SECONDS)
		this.second ||= second
		for (const [name, values] of Object.entries(recorded)) {
			const kept = values.slice(-(SECONDS - later)).map(value => value ?? NaN)
			if (later < SECONDS) this.series[name]?.set(kept, SECONDS - later - kept.length)
		}
	}

	last(name, count = SECONDS) {
		return this.series[name].subarray(SECONDS - count)
	}
}
