"""The faults that `python -m tests.mutation` injects: mistakes that are easy to make and were made."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    name: str
    file: str
    old: str
    """The text to replace, which occurs once in the file."""
    new: str


FAULTS = (
    Fault(
        "a batch that ends does not count as one that waited",
        "shmserve/core/batching/batch.py",
        "if number <= through]",
        "if number < through]",
    ),
    Fault(
        "batch one row too large",
        "shmserve/core/batching/form.py",
        "            if total > rules.max_batch:",
        "            if total > rules.max_batch + 1:",
    ),
    Fault(
        "queue delay one nanosecond late",
        "shmserve/core/batching/form.py",
        "    if age >= delay:",
        "    if age > delay:",
    ),
    Fault(
        "a lease lasts while others wait",
        "shmserve/core/batching/leases.py",
        "        _is_needed(version)\n        or lease",
        "        lease",
    ),
    Fault(
        "work behind a running batch does not end leases",
        "shmserve/core/batching/leases.py",
        "return version.waits > 0 or any(instance.waiting is not None for instance in version.instances)",
        "return version.waits > 0",
    ),
    Fault(
        "a leased request is counted twice if its worker dies",
        "shmserve/core/batching/leases.py",
        "    if error is not None and event.since != lease.recorded:",
        "    if error is not None:",
    ),
    Fault(
        "an instance is not watched over a lease",
        "shmserve/core/batching/leases.py",
        "if version.limit_ns and not instance.watched:",
        "if False:",
    ),
    Fault(
        "outputs over a lease have no limit together",
        "shmserve/core/batching/lending.py",
        "min(INLINE_BYTES // max(sizes), FIELD_BYTES // sum(sizes))",
        "INLINE_BYTES // max(sizes)",
    ),
    Fault(
        "requests that leave a queue are still counted",
        "shmserve/core/batching/queue.py",
        "        self.count += len(requests)",
        "        self.count += 1",
    ),
    Fault("a share does not move on after its turn", "shmserve/core/batching/queue.py", "share.pick(numbers)", "pass"),
    Fault(
        "the rate limiter grants one resource too many",
        "shmserve/core/batching/rate_limiter.py",
        "if self._used.get(key, 0) + resource.count > self.total(key):",
        "if self._used.get(key, 0) + resource.count > self.total(key) + 1:",
    ),
    Fault(
        "a waiting batch is not started",
        "shmserve/core/batching/reports.py",
        "_run_waiting(state, version, instance, message.next, message.through, now)",
        "pass",
    ),
    Fault(
        "a call does not pin its parent's outputs",
        "shmserve/core/calls/calls.py",
        "parent.pins += (block,)",
        "parent.pins += ()",
    ),
    Fault(
        "a failed ensemble goes on",
        "shmserve/core/ensembles/advance.py",
        "        if run.failure is not None and not run.over:",
        "        if False:",
    ),
    Fault(
        "a held back response of an ensemble overtakes",
        "shmserve/core/ensembles/advance.py",
        "if run.open[level] and run.open[level][0].held_back:",
        "if False:",
    ),
    Fault(
        "a step's request does not end",
        "shmserve/core/ensembles/advance.py",
        "completion.end(self._state, step)",
        "pass",
    ),
    Fault("a pin is never released", "shmserve/core/ledger.py", "        hold.pins -= 1", "        hold.pins -= 0"),
    Fault(
        "held bytes of a client are never given back",
        "shmserve/core/ledger.py",
        "client.held_bytes -= freed",
        "client.held_bytes -= 0",
    ),
    Fault(
        "a failed load is forgotten",
        "shmserve/core/models/lifecycle.py",
        "load_results.failed_to_load(self._state, version, instance, load_error or event.reason, now)",
        "pass",
    ),
    Fault(
        "one load more than allowed",
        "shmserve/core/models/loading.py",
        "while len(state.loading) < state.limits.loading:",
        "while len(state.loading) <= state.limits.loading:",
    ),
    Fault(
        "room is not decided again",
        "shmserve/core/models/room.py",
        "_decide_again(state, min((at for at in later if at > now), default=now + wait), now)",
        "pass",
    ),
    Fault(
        "requests of a disconnecting client are admitted",
        "shmserve/core/requests/admission.py",
        "if client.disconnecting:",
        "if False:",
    ),
    Fault(
        "columns with too many requests are taken",
        "shmserve/core/requests/admission.py",
        "if not columns.regular or len(columns.requests) > BATCH_REQUESTS:",
        "if not columns.regular:",
    ),
    Fault(
        "cache ignores the parameters of a request",
        "shmserve/core/requests/cache.py",
        "given = options.parameters.items() if options is not None else ()",
        "given = ()",
    ),
    Fault(
        "quota of segments off by one",
        "shmserve/core/requests/quotas.py",
        "if len(client.segments) >= limits.client_segments:",
        "if len(client.segments) > limits.client_segments:",
    ),
    Fault(
        "an error budget is one too large",
        "shmserve/core/requests/quotas.py",
        "level - now <= DISCONNECT_BURST * DISCONNECT_NS + LONGEST_NS:",
        "level - now <= 2 * DISCONNECT_BURST * DISCONNECT_NS + LONGEST_NS:",
    ),
    Fault(
        "shadow traffic has no limit of memory",
        "shmserve/core/requests/shadow.py",
        "return state.compared_bytes + size <= PENDING_BYTES and 2",
        "return 2",
    ),
    Fault(
        "START accepted while the server drains",
        "shmserve/core/sequences/scheduler.py",
        "        if state.draining:",
        "        if False:",
    ),
    Fault(
        "a sequence waits for a slot without a time limit",
        "shmserve/core/sequences/scheduler.py",
        "state.set_timer(now + options.queue_timeout_us * 1000, Timer.BACKLOG, sequence)",
        "pass",
    ),
    Fault(
        "room for timers is never made",
        "shmserve/core/state.py",
        "if len(self._timers) > 4096 and len(self._timers) > 4 * len(self.requests) + 256:",
        "if False:",
    ),
    Fault(
        "a failure's time is not counted",
        "shmserve/core/stats/statistics.py",
        "        self.fail_ns += ns",
        "        self.fail_ns += 0",
    ),
    Fault("a probe is able for ever", "shmserve/broker/admin/readiness_probes.py", "self._able.discard(peer)", "pass"),
    Fault(
        "an answer of a lease is not read",
        "shmserve/broker/leases.py",
        "self._put(0, LeaseRead(effect.lease, [], final=effect.final))",
        "pass",
    ),
    Fault(
        "a source with more to read is forgotten",
        "shmserve/broker/listeners/fair_turns.py",
        "self._waiting.add(source.user, source, heavy)",
        "pass",
    ),
    Fault(
        "a reader may have one byte more waiting",
        "shmserve/broker/listeners/output_backlog.py",
        "while (mine := self._of_users.get(reader.user, 0)) > limit:",
        "while (mine := self._of_users.get(reader.user, 0)) > 2 * limit:",
    ),
    Fault(
        "an override may leave its folder",
        "shmserve/broker/models/overrides.py",
        "not all(_harmless(part) for part in parts)",
        "False",
    ),
    Fault(
        "traces per second have no limit",
        "shmserve/broker/observability/traces.py",
        "        self._in_second += 1",
        "        self._in_second += 0",
    ),
    Fault(
        "a helper's socket is watched after its end",
        "shmserve/broker/processes/helper_process.py",
        "self._loop.remove_reader(self.link.fileno())",
        "pass",
    ),
    Fault("worker's last messages are lost", "shmserve/broker/processes/workers.py", "worker.link.drain()", "pass"),
    Fault(
        "any role may call an action",
        "shmserve/gateway/auth/access.py",
        "if not roles.intersection(needs) and not (tokens is not None and action in OPEN):",
        "if False:",
    ),
    Fault(
        "a field of protobuf may end behind the message",
        "shmserve/gateway/grpc/wire.py",
        "if at >= size:",
        "if at > size:",
    ),
    Fault(
        "two Hosts are accepted",
        "shmserve/gateway/http/heads.py",
        "            if name in seen:",
        "            if name in seen and name != b'host':",
    ),
    Fault(
        "HTTP/1.1 without Host is accepted",
        "shmserve/gateway/http/heads.py",
        'if b"host" not in seen and http == "1.1":',
        'if b"host" not in seen and http == "1.2":',
    ),
    Fault(
        "HTTP/2 window may overflow by one",
        "shmserve/gateway/http2/protocol.py",
        "if self.window > frames.LARGEST_WINDOW:",
        "if self.window > frames.LARGEST_WINDOW + 1:",
    ),
    Fault(
        "taken bytes of a stream are not counted",
        "shmserve/gateway/http2/protocol.py",
        "stream.taken += length",
        "stream.taken += 0",
    ),
    Fault(
        "depth of JSON is not checked below zero",
        "shmserve/gateway/kserve/json_scan.py",
        "if depths.min() < 0:",
        "if False:",
    ),
    Fault(
        "JSON data may have one value too few",
        "shmserve/gateway/kserve/json_tensors.py",
        "    if decoded != count:",
        "    if decoded > count:",
    ),
    Fault(
        "a body budget keeps holders that left",
        "shmserve/gateway/limits/body_budget.py",
        "budget.holders -= 1",
        "budget.holders -= 0",
    ),
    Fault(
        "a share may be exceeded by one",
        "shmserve/gateway/limits/caller_shares.py",
        "    if not used or used + more <= limit:",
        "    if not used or used + more <= limit + 1:",
    ),
    Fault(
        "calls of an account are not counted",
        "shmserve/gateway/limits/caller_shares.py",
        "account.calls += 1",
        "account.calls += 0",
    ),
    Fault(
        "a reader has no share of a turn",
        "shmserve/gateway/limits/turns.py",
        "if reader.read_bytes >= self._share or self._left <= 0:",
        "if self._left <= 0:",
    ),
    Fault(
        "a list of stop words is one longer",
        "shmserve/gateway/openai/bodies.py",
        "if len(given) > most:",
        "if len(given) > most + 1:",
    ),
    Fault(
        "a token for streams is not passed on", "shmserve/gateway/openai/generation.py", "self.on_part(stream)", "pass"
    ),
    Fault(
        "a template may read without limit",
        "shmserve/gateway/openai/templates.py",
        "if size > INPUT_BYTES:",
        "if False:",
    ),
    Fault(
        "a second Hello is accepted",
        "shmserve/gateway/zmq_tcp/peer.py",
        'self.goodbye(ProtocolError("second Hello on one connection"))',
        "pass",
    ),
    Fault("maps of a lost server are kept", "shmserve/session/announcements.py", "    self.maps.clear()", "    pass"),
    Fault(
        "a tensor more than allowed is sent",
        "shmserve/session/encode.py",
        "if len(tensors) > TENSORS:",
        "if len(tensors) > TENSORS + 1:",
    ),
    Fault("a lease's packet has no limit", "shmserve/session/leases.py", "if len(data) > PACKET_BYTES:", "if False:"),
    Fault("withdrawn questions stay", "shmserve/session/queries.py", "self.withdraw(number)", "pass"),
    Fault("a resent request names old memory", "shmserve/session/resend.py", "restage(ticket, memory)", "pass"),
    Fault(
        "inputs of an ended call are kept", "shmserve/session/session.py", "self.memory.release_inputs(kept)", "pass"
    ),
    Fault(
        "freed segments are still committed",
        "shmserve/shm/arena.py",
        "self.committed -= segment.size",
        "self.committed -= 0",
    ),
    Fault(
        "empty blocks share an offset",
        "shmserve/shm/blocks.py",
        "size = (size + mask) & ~mask or mask + 1",
        "size = (size + mask) & ~mask",
    ),
    Fault(
        "the rest of a split block is lost",
        "shmserve/shm/blocks.py",
        "        live[offsets[-1]] += offset + whole - start",
        "        live[offsets[-1]] += 0",
    ),
    Fault("a gap before a block is lost", "shmserve/shm/blocks.py", "self._drop_free(before, start)", "pass"),
    Fault(
        "a memfd of another size is mapped",
        "shmserve/shm/extents/memfd.py",
        "if status.st_size != size or size <= 0:",
        "if size <= 0:",
    ),
    Fault(
        "a POSIX name is not removed",
        "shmserve/shm/extents/posix.py",
        "posix_ipc.unlink_shared_memory(self.name)",
        "pass",
    ),
    Fault(
        "a name may leave /dev/shm",
        "shmserve/shm/extents/posix.py",
        'if not _NAME.fullmatch(name) or name.strip("/") in (".", ".."):',
        "if False:",
    ),
    Fault(
        "strings may end behind the buffer",
        "shmserve/shm/strings.py",
        "        if at > end:",
        "        if at > end + 1:",
    ),
    Fault(
        "packets have no limit of size",
        "shmserve/protocol/codec.py",
        "        if len(packet) > PACKET_BYTES:",
        "        if len(packet) > 2 * PACKET_BYTES:",
    ),
    Fault(
        "one bad message more is kept",
        "shmserve/protocol/codec.py",
        "                if refused > REFUSED:",
        "                if refused > REFUSED + 1:",
    ),
    Fault(
        "one CUDA graph too many",
        "workers/backends/onnx/graphs.py",
        "len(self._recorded) >= MOST_SHAPES:",
        "len(self._recorded) > MOST_SHAPES:",
    ),
    Fault(
        "a string of a model's message ends one early",
        "workers/backends/python/pb_utils.py",
        "while at < len(data):",
        "while at < len(data) - 1:",
    ),
    Fault(
        "paddings of different length are one batch",
        "workers/batch/gather.py",
        "if len(found) > 1 or spec.pad.rounded(length) != length:",
        "if len(found) > 1:",
    ),
    Fault(
        "rows of a tensor are not compared with the request's",
        "workers/batch/input_reader.py",
        "            if work.rows and (not tensor.shape or tensor.shape[0] != work.rows):",
        "            if False:",
    ),
    Fault(
        "inputs of another dtype are taken",
        "workers/batch/input_reader.py",
        "        if tensor.dtype != spec.dtype:",
        "        if False:",
    ),
    Fault(
        "outputs at the caller's place may be too small",
        "workers/batch/results.py",
        "map(lt, [place.size for place in handles], sizes)",
        "map(lt, [place.size + 1 for place in handles], sizes)",
    ),
    Fault("an error of one request is not reported", "workers/batch/results.py", "self.fail(position, error)", "pass"),
    Fault(
        "states of an ended sequence are kept", "workers/batch/sequence_inputs.py", "self._kept.pop(key, None)", "pass"
    ),
    Fault("a failed load exits like a crash", "workers/bootstrap.py", "sys.exit(LOAD_FAILED)", "sys.exit(1)"),
    Fault("a model prints into the protocol", "workers/main.py", "os.dup2(2, 1)", "pass"),
    Fault("awaited calls are not counted", "workers/model_calls/calls.py", "self._awaited += 1", "self._awaited += 0"),
    Fault(
        "a bad return is not logged",
        "workers/output_arenas.py",
        'log_message(f"a returned handle cannot be freed: {error}")',
        "raise",
    ),
    Fault(
        "an unpacked archive has no limit",
        "workers/process/environment_archive.py",
        "self._bytes += member.size",
        "self._bytes += 0",
    ),
    Fault("an expanded override is not looked over", "repo/config/override.py", "_look_over(text)", "pass"),
    Fault("a cache is not cleared", "repo/remote/cache.py", "self._clear()", "pass"),
    Fault(
        "credentials are shown in errors",
        "repo/remote/credentials.py",
        'redact.add(given.get(name) for name in ("secret_key", "key_id", "session_token"))',
        "pass",
    ),
    Fault("an object of another size is kept", "repo/remote/download.py", "if 0 <= file.size != written:", "if False:"),
    Fault("a negative dim in a reshape is accepted", "repo/rules/fields.py", "counts[-1] *= dim", "counts[-1] *= 1"),
    Fault("a scheduler's dim of zero is accepted", "repo/rules/schedulers.py", "if dim < 1:", "if dim < 0:"),
    Fault(
        "an empty generation is cloned",
        "repo/storage/generation.py",
        "self._clones = sizes.total_bytes > 0",
        "self._clones = True",
    ),
)
