"""Header blocks of an HTTP/2 connection: each opens a call, or ends one with trailers."""

from __future__ import annotations

from shmserve.gateway.http2 import heads
from shmserve.gateway.http2 import limits as most
from shmserve.gateway.http2.life import Life
from shmserve.gateway.http2.stream import Http2Stream, Http2Streams
from shmserve.gateway.limits.backlog import REQUEST_WORK
from shmserve.http2 import frames
from shmserve.http2.frames import ErrorCode, Http2Error
from shmserve.protocol.grpc.codes import Code, RpcError


class HeaderBlocks:
    """The header blocks of one connection."""

    def __init__(self, core: Http2Streams, life: Life) -> None:
        self._core = core
        self._life = life
        self._heads = heads.Http2Heads()
        self.pending: heads.HeaderBlock | None = None
        """An incomplete header block; the next frame must be its CONTINUATION."""

    def headers(self, number: int, flags: int, payload: bytes) -> None:
        if flags & (frames.PADDED | frames.WITH_PRIORITY):
            payload = heads.unpadded(flags, payload)
        if not number & 1:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "HEADERS on a stream id that clients may not use")
        if len(payload) > heads.HEAD_BYTES:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"the headers of the call exceed {heads.HEAD_BYTES} bytes")
        if flags & frames.END_HEADERS:
            self._done(number, flags, payload)
        else:
            self.pending = heads.HeaderBlock(number, flags, payload)

    def continuation(self, flags: int, payload: bytes) -> None:
        block = self.pending
        if block is None:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        block.add(payload)
        if flags & frames.END_HEADERS:
            self.pending = None
            self._done(block.number, block.flags, b"".join(block.parts))

    def _done(self, number: int, flags: int, block: bytes) -> None:
        core, ended = self._core, bool(flags & frames.END_STREAM)
        if number > core.last:
            core.last = number
            head = self._heads.head(block)
            self._count_fields()
            self._open(number, head, ended)
            return
        malformed = self._heads.trailers(block)
        self._count_fields()
        stream = core.streams.get(number)
        if stream is None:
            self._closed_headers(number, ended)
        elif stream.half:
            core.reset(stream, ErrorCode.STREAM_CLOSED)
        elif not ended or malformed:
            stream.half = ended
            core.reset(stream, ErrorCode.PROTOCOL_ERROR)
        elif stream.head.length is None or core.fits(stream, 0, True):
            stream.half = True
            stream.ended()

    def _count_fields(self) -> None:
        core, fields = self._core, self._heads.fields
        core.work -= most.FIELD_WORK * fields
        if fields > most.FIELDS:
            core.abuse.idle(fields - most.FIELDS)

    def _closed_headers(self, number: int, ended: bool) -> None:
        core = self._core
        if core.closed.ignores(number, ended):
            core.abuse.idle()
        elif number in core.closed:
            raise Http2Error(ErrorCode.STREAM_CLOSED, "HEADERS on a closed stream")
        else:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "HEADERS of a new stream with an id below the last one")

    def _open(self, number: int, head: heads.Http2Head, ended: bool) -> None:
        core = self._core
        if number > self._life.last:
            core.closed.add(number, ended)
            return
        core.work -= REQUEST_WORK
        if len(core.streams) >= core.limits.streams:
            core.closed.add(number, ended)
            core.abuse.idle()
            core.send_reset(number, ErrorCode.REFUSED_STREAM)
            return
        if head.malformed or (ended and head.length):
            core.closed.add(number, ended)
            core.refuse(number, ErrorCode.PROTOCOL_ERROR)
            return
        if head.status != 200:
            core.closed.add(number, ended)
            core.abuse.mistake()
            core.out.append(heads.refused(number, head.status, ended))
            core.wake()
            return
        expires = None if head.timeout is None else core.listener.now() + head.timeout
        stream = Http2Stream(core, number, head, core.stream_window, expires)
        core.streams[number] = stream
        if expires is not None:
            core.listener.expire(stream)
        if self._heads.bytes > most.SMALL_HEAD and not stream.hold_head(self._heads.bytes):
            return
        try:
            if head.wrong:
                raise RpcError(Code.INTERNAL, head.wrong)
            if head.encoding and head.encoding not in heads.ENCODINGS:
                raise RpcError(Code.UNIMPLEMENTED, f"Compression algorithm '{head.encoding[:40]}' is not supported")
            stream.serve(core.listener.application(stream))
        except RpcError as error:
            stream.half = ended
            stream.fail(error)
            core.abuse.mistake()
            return
        except Exception:
            stream.fail_internally()
            return
        if ended and not stream.over:
            stream.half = True
            stream.ended()
