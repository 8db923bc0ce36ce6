/** What happened between two states of a model version's counters, as `shmserve top` computes it. */

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

/** Rates and means between two states of counters; null if they were reset meanwhile. */
export function between(before, after, seconds) {
	const grown = name => (after[name] ?? 0) - (before[name] ?? 0)
	if (!(seconds > 0) || ["success", "failed", "batches", "rows"].some(name => grown(name) < 0)) return null
	const answered = grown("success")
	const mean = name => (answered ? grown(name) / answered / 1e9 : null)
	const times = more(before.request_times, after.request_times)
	return {
		answered,
		times,
		requests: (answered + grown("failed")) / seconds,
		failed: grown("failed") / seconds,
		batch: grown("batches") ? grown("rows") / grown("batches") : null,
		spent: grown("batch_ns") / 1e9 / seconds,
		reasons: more(before.reasons, after.reasons),
		sizes: more(before.batch_rows, after.batch_rows),
		queue: mean("queue_ns"),
		input: mean("input_ns"),
		infer: mean("infer_ns"),
		output: mean("output_ns"),
		p50: quantile(times, 0.5),
		p99: quantile(times, 0.99),
	}
}

/** The last values of a few series; NaN is a missing one. */
export class History {
	constructor(names, kept = 300) {
		this.kept = kept
		this.written = 0
		this.series = Object.fromEntries(names.map(name => [name, new Float32Array(kept)]))
	}

	push(values) {
		for (const [name, series] of Object.entries(this.series)) series[this.written % this.kept] = values[name] ?? NaN
		this.written += 1
	}

	last(name, most = this.kept) {
		const length = Math.min(this.written, this.kept, most)
		const first = this.written - length
		return Array.from({length}, (_, at) => this.series[name][(first + at) % this.kept])
	}
}
