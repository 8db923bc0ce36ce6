"""The binding of the CUDA runtime, and the classes of streams and devices."""

from __future__ import annotations

from typing import Any

from . import runtime

__all__ = ["Device", "Stream", "current_stream", "runtime"]
_current = [0]


def current_stream() -> int:
    """Of this process: the stand-in does not distinguish threads."""
    return _current[-1]


class Stream:
    """As a context, the current stream."""

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self.ptr = 0 if null else runtime.streamCreateWithFlags(1 if non_blocking else 0)

    def synchronize(self) -> None:
        runtime.streamSynchronize(self.ptr)

    def __enter__(self) -> Stream:
        _current.append(self.ptr)
        return self

    def __exit__(self, *_: Any) -> None:
        _current.pop()

    def __del__(self) -> None:
        if self.ptr in runtime.state.streams and self.ptr:
            runtime.streamSynchronize(self.ptr)  # the real library completes the work of a destroyed stream
            runtime.streamDestroy(self.ptr)


class Device:
    """The only device."""

    def __init__(self, device: int = 0) -> None:
        self.id = device

    def synchronize(self) -> None:
        runtime.deviceSynchronize()

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: Any) -> None: ...
