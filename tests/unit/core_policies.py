"""The words of scenario files for what a model is like."""

from __future__ import annotations

import re

from shmserve.core.policy import BatchPolicy, ModelPolicy, QueuePolicy, TensorSpec, TimeoutAction

UNITS = {"us": 10**3, "ms": 10**6, "s": 10**9}


def nanoseconds(text: str) -> int:
    found = re.fullmatch(r"([\d.]+)(us|ms|s)", text)
    assert found, f"'{text}' is no time; write 10s, 5ms or 300us"
    return round(float(found[1]) * UNITS[found[2]])


def policy_of(name: str, flags: tuple[str, ...], options: dict[str, str]) -> ModelPolicy:
    batching = None
    if "single" not in flags:
        levels = int(options.get("levels", 0))
        each = {n: _queue(options[f"level{n}"]) for n in range(1, levels + 1) if f"level{n}" in options}
        batching = BatchPolicy(
            preferred=tuple(int(size) for size in options.get("preferred", "").split(",") if size),
            delay_ns=nanoseconds(options.get("delay", "0s")),
            preserve_ordering="ordered" in flags,
            levels=levels,
            default_level=int(options.get("default_level", 0)),
            default_policy=_queue(options.get("policy", "")),
            level_policies=each,
        )
    inputs = tuple(_tensor(text) for text in options.get("inputs", "x:[-1]").split("|"))
    outputs = tuple(TensorSpec(text, "FP32", (-1,)) for text in options.get("outputs", "y").split(","))
    version = int(options.get("version", 1))
    limit = nanoseconds(options["limit"]) if "limit" in options else None
    most = int(options.get("max_batch", 8))
    return ModelPolicy(name, version, most, inputs, outputs, batching, limit, "no_retry" not in flags)


def _queue(text: str) -> QueuePolicy:
    """reject:1s, delay:1s, with :override and :size4"""
    words = text.split(":") if text else ["reject"]
    size = [int(word.removeprefix("size")) for word in words if word.startswith("size")]
    times = [nanoseconds(word) for word in words if re.fullmatch(r"[\d.]+(us|ms|s)", word)]
    return QueuePolicy(TimeoutAction(words[0]), times[0] if times else 0, "override" in words, size[0] if size else 0)


def _tensor(text: str) -> TensorSpec:
    """x:[-1,4] with :optional and :ragged"""
    name, dims, *flags = text.split(":")
    numbers = tuple(int(dim) for dim in dims.strip("[]").split(",") if dim)
    return TensorSpec(name, "FP32", numbers, "optional" in flags, "ragged" in flags)
