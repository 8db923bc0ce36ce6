"""The faults that `python -m tests.mutation` injects: mistakes that are easy to make and were made."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    name: str
    file: str
    old: str
    """The text to replace, which occurs once in the file."""
    new: str


TABLE = {
    "shmserve/core/service/form.py": [
        ("batch one row too large", "            if total > rules.max_batch:",
         "            if total > rules.max_batch + 1:"),
        ("queue delay one nanosecond late", "    if age >= delay:", "    if age > delay:")],
    "shmserve/core/batching/leases.py": [
        ("a lease lasts while others wait", "if not _is_needed(version) and not _forbidden", "if not _forbidden"),
        ("a client is not told of a withdrawn offer",
         "    if not lease.client.gone:\n        state.send(lease.client.number, LeaseEnd(lease.number))\n", ""),
        ("work behind a running batch does not end leases",
         "return version.waits > 0 or any(instance.waiting is not None for instance in version.instances)",
         "return version.waits > 0"),
        ("a leased request is counted twice if its worker dies",
         "    if error is not None and event.since != lease.recorded:", "    if error is not None:")],
    "shmserve/core/service/lending.py": [
        ("outputs over a lease have no limit together", "min(INLINE_BYTES // max(sizes), FIELD_BYTES // sum(sizes))",
         "INLINE_BYTES // max(sizes)")],
    "shmserve/core/service/queue.py": [
        ("requests that leave a queue are still counted", "        self.count += len(requests)",
         "        self.count += 1"),
        ("a share does not move on after its turn", "share.pick(numbers)", "pass")],
    "shmserve/core/owners/rate_limiter.py": [
        ("the rate limiter grants one resource too many",
         "if self._used.get(key, 0) + resource.count > self.total(key):",
         "if self._used.get(key, 0) + resource.count > self.total(key) + 1:")],
    "shmserve/core/batching/reports.py": [
        ("a waiting batch is not started", "_run_waiting(state, version, instance, message.next, message.through, now)",
         "pass")],
    "shmserve/core/calls/calls.py": [
        ("a call does not pin the inputs of its parent", "place = ledger.block_of(handle)", "place = None")],
    "shmserve/core/ensembles/advance.py": [
        ("a failed ensemble goes on", "        if run.failure is not None and not run.over:", "        if False:"),
        ("a held back response of an ensemble overtakes", "if run.open[level] and run.open[level][0].held_back:",
         "if False:"),
        ("rows of a mapped step after the first are not requested",
         "            elif run.mapped:\n                self._queue_rows(run)\n", ""),
        ("an output of an ensemble has the shape of its step",
         "shape = graph.reshape(graph.fit(shape, inner, batches), inner, spec.dims, batches)", "pass"),
        ("the inputs of an ended source stay",
         "            del run.sources[iteration.level]\n            self._have_read(run, iteration, index)",
         "            del run.sources[iteration.level]\n            iteration.remaining -= 1"),
        ("a step's request does not end", "exit.end(self._state, step)", "pass"),
        ("outputs of a closed iteration stay",
         "        for kept in iteration.tensors.values():\n            self._release_tensor(run, kept)\n", ""),
        ("results of dropped steps stay", "            if not isinstance(message, Fail):\n                run.drop(",
         "            if False:\n                run.drop(")],
    "shmserve/core/ensembles/steps.py": [
        ("every row of a mapped step is placed in the same memory", "if wanted.place is not None and step.mapped:",
         "if False:"),
        ("classes of an ensemble have no labels", "_labels(run, index) if outputs is not plan.outputs else ()", "()")],
    "shmserve/core/intake/begin_run.py": [
        ("an input of an ensemble is not reshaped", "if spec.reshape is not None and spec.name == tensor.name:",
         "if False:")],
    "workers/backends/device_buffers.py": [
        ("memory in use by a device is unpinned", "        self._cuda.settle()", "        pass")],
    "shmserve/core/ledger.py": [
        ("a pin is never released", "        hold.pins -= 1", "        hold.pins -= 0"),
        ("held bytes of a client are never given back", "client.held_bytes -= freed", "client.held_bytes -= 0")],
    "shmserve/core/models/lifecycle.py": [
        ("a failed load is forgotten",
         "load_results.failed_to_load(self._state, version, instance, load_error or event.reason, now)", "pass")],
    "shmserve/core/models/loading.py": [
        ("one load more than allowed", "while len(state.loading.running) < state.limits.loading:",
         "while len(state.loading.running) <= state.limits.loading:")],
    "shmserve/core/models/room.py": [
        ("room is not decided again",
         "_decide_again(state, min((at for at in later if at > now), default=now + wait), now)", "pass")],
    "shmserve/core/intake/admission.py": [
        ("requests of a disconnecting client are admitted", "if client.disconnecting:", "if False:"),
        ("columns with too many requests are taken",
         "if not columns.regular or len(columns.requests) > BATCH_REQUESTS:", "if not columns.regular:"),
        ("memory of a worker can be announced by its name", "segment.owner >= WORKERS_FROM or segment.audience",
         "segment.audience")],
    "shmserve/core/owners/cache.py": [
        ("cache ignores the parameters of a request",
         "parameters = options.parameters.items() if options is not None else ()", "parameters = ()"),
        ("an evicted response stays pinned", "        self._outputs.unpin(entry.handles)\n", "")],
    "shmserve/core/intake/intake.py": [
        ("frames of an ended request stay", "(*blocks, *[ledger.pin(place) for place in places])",
         "tuple([ledger.pin(place) for place in places])"),
        ("columns of a client that holds too much are taken", "                and client.held_bytes <= self._heavy\n",
         ""),
        ("requests overtake those that waited for a load",
         "        elif version is not None and state.loaded_versions and waited is None:",
         "        elif version is None and state.loaded_versions and waited is None:")],
    "shmserve/core/intake/enqueue.py": [
        ("a suspect has a queue timeout", "not request.delayed and not request.suspect", "not request.delayed"),
        ("a cached response is not held by its client", "    state.outputs.pass_on(request, entry.handles)\n", "")],
    "shmserve/core/intake/quotas.py": [
        ("quota of segments off by one", "if len(client.segments) >= limits.client_segments:",
         "if len(client.segments) > limits.client_segments:"),
        ("an error budget is one too large", "level - now <= DISCONNECT_BURST * DISCONNECT_NS + LONGEST_NS:",
         "level - now <= 2 * DISCONNECT_BURST * DISCONNECT_NS + LONGEST_NS:")],
    "shmserve/core/exit/shadow.py": [
        ("shadow traffic has no limit of memory", "return state.compared_bytes + size <= PENDING_BYTES and 2",
         "return 2"),
        ("a compared response stays counted", "        state.compared_bytes -= self.size\n", "")],
    "shmserve/core/batching/sequence_scheduler.py": [
        ("START accepted while the server drains", "        if state.draining:", "        if False:"),
        ("a sequence waits for a slot without a time limit",
         "state.set_timer(now + options.queue_timeout_us * 1000, Timer.BACKLOG, sequence)", "pass")],
    "shmserve/core/state.py": [
        ("room for timers is never made", "if len(self._timers) > self._sweep_at:", "if False:")],
    "shmserve/core/stats/statistics.py": [
        ("a failure's time is not counted", "        self.fail_ns += ns", "        self.fail_ns += 0")],
    "shmserve/broker/admin/readiness_probes.py": [("a probe is able for ever", "self._able.discard(peer)", "pass")],
    "shmserve/broker/leases.py": [
        ("an answer of a lease is not read", "self._put(0, LeaseRead(effect.lease, [], final=effect.final))", "pass")],
    "shmserve/broker/listeners/fair_turns.py": [
        ("a source with more to read is forgotten", "self._waiting.add(source.user, source, heavy)", "pass")],
    "shmserve/broker/listeners/output_backlog.py": [
        ("a reader may have one byte more waiting", "while (unsent := self._of_users.get(reader.user, 0)) > limit:",
         "while (unsent := self._of_users.get(reader.user, 0)) > 2 * limit:")],
    "shmserve/broker/models/overrides.py": [
        ("an override may leave its folder", "not all(_harmless(part) for part in parts)", "False")],
    "shmserve/broker/observability/traces.py": [
        ("traces per second have no limit", "if self._logged.count(traced.answered) <= PER_SECOND:", "if True:")],
    "shmserve/broker/processes/helper_process.py": [
        ("a helper's socket is watched after its end", "self._loop.remove_reader(self.link.fileno())", "pass")],
    "shmserve/broker/processes/workers.py": [("worker's last messages are lost", "worker.link.flow.drain()", "pass")],
    "shmserve/gateway/auth/access.py": [
        ("any role may call an action",
         "if not roles.intersection(needs) and not (tokens is not None and action in OPEN):", "if False:")],
    "shmserve/gateway/grpc/wire.py": [
        ("a field of protobuf may end behind the message", "if at >= size:", "if at > size:")],
    "shmserve/gateway/http/heads.py": [
        ("two Hosts are accepted", "            if name in seen:", "            if name in seen and name != b'host':"),
        ("HTTP/1.1 without Host is accepted", 'if b"host" not in seen and http == "1.1":',
         'if b"host" not in seen and http == "1.2":')],
    "shmserve/gateway/http2/protocol.py": [
        ("HTTP/2 window may overflow by one", "if self.output.window > frames.LARGEST_WINDOW:",
         "if self.output.window > frames.LARGEST_WINDOW + 1:"),
        ("taken bytes of a stream are not counted", "stream.taken += length", "stream.taken += 0")],
    "shmserve/gateway/kserve/json_scan.py": [
        ("depth of JSON is not checked below zero", "if depths.min() < 0:", "if False:")],
    "shmserve/gateway/kserve/json_tensors.py": [
        ("JSON data may have one value too few", "    if decoded != count:", "    if decoded > count:")],
    "shmserve/gateway/limits/body_budget.py": [
        ("a body budget keeps holders that left", "budget.holders -= 1", "budget.holders -= 0")],
    "shmserve/gateway/limits/caller_shares.py": [
        ("a share may be exceeded by one", "    if not used or used + more <= limit:",
         "    if not used or used + more <= limit + 1:"),
        ("calls of an account are not counted", "account.calls += 1", "account.calls += 0"),
        ("any caller may say who it is", "if named and self.is_of_proxy else", "if named else")],
    "shmserve/gateway/limits/turns.py": [
        ("a reader has no share of a turn", "if reader.read_bytes >= self._share or self._remaining <= 0:",
         "if self._remaining <= 0:")],
    "shmserve/gateway/openai/bodies.py": [
        ("a list of stop words is one longer", "if len(items) > limit:", "if len(items) > limit + 1:")],
    "shmserve/gateway/openai/generation.py": [("a token for streams is not passed on", "self.on_part(stream)", "pass")],
    "shmserve/gateway/openai/templates.py": [
        ("a template may read without limit", "if size > INPUT_BYTES:", "if False:")],
    "shmserve/gateway/zmq_tcp/peer.py": [
        ("a second Hello is accepted", 'self.goodbye(ProtocolError("second Hello on one connection"))', "pass")],
    "shmserve/session/announcements.py": [("maps of a lost server are kept", "    self.maps.clear()", "    pass")],
    "shmserve/session/encode.py": [
        ("a tensor more than allowed is sent", "if len(tensors) > TENSORS:", "if len(tensors) > TENSORS + 1:")],
    "shmserve/session/leases.py": [
        ("a lease's packet has no limit", "return data if len(data) <= PACKET_BYTES else None", "return data"),
        ("requests that have waited for a lease are lost", "for message in ended.waiting if", "for message in () if")],
    "shmserve/session/queries.py": [("withdrawn questions stay", "self.withdraw(number)", "pass")],
    "shmserve/session/resend.py": [("a resent request names old memory", "restage(ticket, memory)", "pass")],
    "shmserve/session/session.py": [
        ("inputs of an ended call are kept",
         "        finally:\n            if kept is not None:\n                self.memory.release_inputs(kept)",
         "        finally:\n            pass")],
    "shmserve/shm/arena.py": [
        ("freed segments are still committed", "self.committed -= segment.size", "self.committed -= 0")],
    "shmserve/shm/blocks.py": [
        ("empty blocks share an offset", "size = (size + mask) & ~mask or mask + 1", "size = (size + mask) & ~mask"),
        ("the rest of a split block is lost", "        live[offsets[-1]] += offset + whole - start",
         "        live[offsets[-1]] += 0"),
        ("a gap before a block is lost", "self._drop_free(before, start)", "pass")],
    "shmserve/shm/extents/memfd.py": [
        ("a memfd of another size is mapped", "if status.st_size != size or size <= 0:", "if size <= 0:")],
    "shmserve/shm/extents/posix.py": [
        ("a POSIX name is not removed", "posix_ipc.unlink_shared_memory(self.name)", "pass"),
        ("a name may leave /dev/shm", 'if not _NAME.fullmatch(name) or name.strip("/") in (".", ".."):', "if False:")],
    "shmserve/shm/strings.py": [
        ("strings may end behind the buffer", "        if at > end:", "        if at > end + 1:")],
    "shmserve/protocol/codec.py": [
        ("packets have no limit of size", "        if len(packet) > PACKET_BYTES:",
         "        if len(packet) > 2 * PACKET_BYTES:"),
        ("one bad message more is kept", "                if refused > REFUSED:",
         "                if refused > REFUSED + 1:")],
    "workers/backends/onnx/graphs.py": [
        ("one CUDA graph too many", "len(self._recorded) >= MAX_SHAPES:", "len(self._recorded) > MAX_SHAPES:")],
    "workers/backends/python/pb_utils.py": [
        ("a string of a model's message ends one early", "while at < len(data):", "while at < len(data) - 4:")],
    "workers/batch/gather.py": [
        ("paddings of different length are one batch", "if len(padded) > 1 or spec.pad.rounded(length) != length:",
         "if len(padded) > 1:"),
        ("rows of a tensor are not compared with the request's",
         "            if work.rows and (not tensor.shape or tensor.shape[0] != work.rows):", "            if False:"),
        ("inputs of another dtype are taken", "        if tensor.dtype != spec.dtype:", "        if False:")],
    "workers/batch/results.py": [
        ("outputs at the caller's place may be too small", "map(lt, [place.size for place in handles], sizes)",
         "map(lt, [place.size + 1 for place in handles], sizes)"),
        ("an output that the model leaves out is an error although outputs are not strict",
         "if not self._scatter.checks.strict:", "if False:")],
    "workers/batch/sequence_inputs.py": [("states of an ended sequence are kept", "self._kept.pop(key, None)", "pass")],
    "workers/bootstrap.py": [("a failed load exits like a crash", "sys.exit(LOAD_FAILED)", "sys.exit(1)")],
    "workers/main.py": [("a model prints into the protocol", "os.dup2(2, 1)", "pass")],
    "workers/model_calls/calls.py": [("awaited calls are not counted", "self._awaited += 1", "self._awaited += 0")],
    "workers/output_arenas.py": [
        ("a bad return is not logged", 'log_message(f"a returned handle cannot be freed: {error}")', "raise")],
    "workers/process/environment_archive.py": [
        ("an unpacked archive has no limit", "self._bytes += member.size", "self._bytes += 0")],
    "repo/config/override.py": [("an expanded override is not looked over", "_look_over(text)", "pass")],
    "repo/remote/cache.py": [("a cache is not cleared", "self._clear()", "pass")],
    "repo/remote/credentials.py": [
        ("credentials are shown in errors",
         'redact.add(settings.get(name) for name in ("secret_key", "key_id", "session_token"))', "pass")],
    "repo/remote/download.py": [("an object of another size is kept", "if 0 <= file.size != written:", "if False:")],
    "repo/rules/fields.py": [("a negative dim in a reshape is accepted", "counts[-1] *= dim", "counts[-1] *= 1")],
    "repo/rules/schedulers.py": [("a scheduler's dim of zero is accepted", "if dim < 1:", "if dim < 0:")],
    "repo/storage/generation.py": [
        ("an empty generation is cloned", "self._clones = sizes.total_bytes > 0", "self._clones = True")],
    "shmserve/core/exit/exit.py": [
        ("pins of an ended request stay", "    for handle in request.pins:\n        ledger.unpin(handle)\n",
         "    pass\n"),
        ("segments of an ended request stay in use", "        ledger.done_with(request.segments)\n", ""),
        ("inputs of an ended request are still counted", "        request.client.input_bytes -= request.input_bytes\n",
         ""),
        ("a dropped response keeps its outputs",
         "        state.outputs.drop(request.requester, request.reply.outputs)\n", "        pass\n"),
        ("the requester of a lingering request still waits", "    request.requester.detached(request)\n", ""),
        ("the requester of a lingering request is not told of its end", "    request.requester.released(request)\n",
         ""),
        ("an answered request does not leave its requester", "    request.requester.ended(request)\n", ""),
        ("ended streams still count as abandoned", "        state.abandoned[request.payer.user] -= 1\n",
         "        pass\n"),
        ("a sequence keeps its ended request", "        request.sequence.on_left(request)\n", "        pass\n"),
        ("a lingering request holds up those behind it",
         "    if request.version.service.order is not None:\n        respond_in_order(state, request.version)\n", ""),
        ("bytes of answered requests are still counted", "        client.bytes -= request.inline\n", ""),
        ("a caller is never forgotten", "    request.payer.leave(1, state.now - request.arrived)\n", ""),
        ("keeping a model waiting costs a caller nothing", "    version.service.queue.charge(request, ",
         "    version.service.queue.charge(request, 0 * ")],
    "shmserve/core/records.py": [
        ("a batch that ends does not count as one that waited", "if number <= through]", "if number < through]"),
        ("time in which a batch waits for several callers counts twice",
         "        self.stalled_since = now\n        del", "        del"),
        ("waiting for a caller counts as the time of a batch",
         "        return now - self.began - self.waited - self.waited_for_callers(now)\n",
         "        return now - self.began - self.waited\n"),
        ("a client of frames holds outputs", "            self.drop(handles_of(message.outputs))\n",
         "            pass\n"),
        ("an answered call does not resume its caller", "            self.answered.append(self)\n", "")],
    "shmserve/core/owners/outputs.py": [
        ("outputs that nobody gets are not returned", "                ledger.send_back(handle)\n",
         "                pass\n"),
        ("outputs in the caller's memory are held", "request.requester.hold(request.client.of_others(handles))",
         "request.requester.hold(handles)")],
    "shmserve/core/owners/run.py": [
        ("a run keeps outputs that nobody reads", "            self.ledger.unpin(handle)\n", "            pass\n"),
        ("an ended step still counts", "        client.steps -= 1\n", "")],
    "shmserve/core/stats/callers.py": [
        ("any client may name callers that count like users", "(whole, name) if self._trusted",
         "(whole, name) if name")],
    "shmserve/gateway/listeners/handshakes.py": [
        ("any client may send a PROXY header", "if not self._proxies.trusts(arrival.peer):", "if not self._proxies:")],
    "shmserve/core/exit/responses.py": [
        ("a stream that nobody reads holds its model although others wait",
         "        if version.waits or instance.waiting is not None:",
         "        if version.waits and instance.waiting is not None:")],
    "shmserve/core/models/shares.py": [
        ("a caller who wakes many models puts those of others to sleep",
         "other != self._user and self._held.get(other, 0.0) < holds",
         "other != self._user and self._held.get(other, 0.0) > holds"),
        ("a caller who wakes many models goes first", "    turns[sleep_state.waker] = state.now",
         "    turns[sleep_state.waker] = 0")],
    "workers/model_calls/responses.py": [
        ("a model waits for a caller that does not read", "stream.kept_bytes + size > BUFFER_BYTES", "True")],
    "workers/runner.py": [
        ("empty slots of a native backend's batch are left out",
         "        if hidden is not None and hidden.slots and requests:", "        if False:")],
    "workers/backends/native/shim/response.c": [
        ("a state of a native backend with one buffer does not begin as the old one",
         "    if (before != NULL && before->buffer_count == 1)",
         "    if (before != NULL && before->buffer_count == 2)")],
}  # fmt: skip
"""By file: the name of a fault, the text that it replaces, and the new text."""
FAULTS = tuple(Fault(name, file, old, new) for file, faults in TABLE.items() for name, old, new in faults)
