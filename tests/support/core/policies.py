"""Models for unit tests, and the parser of model descriptions in scenario files."""

from __future__ import annotations

import re
from typing import Any

from shmserve.core.policy import (
    BatchPolicy,
    IdControl,
    InstanceSpec,
    ModelPolicy,
    PaddingPolicy,
    QueuePolicy,
    Resource,
    ScaledGroup,
    ScalingPolicy,
    SequencePolicy,
    StepPolicy,
    TensorSpec,
    TimeoutAction,
)

UNITS = {"us": 10**3, "ms": 10**6, "s": 10**9}

SPECS = (TensorSpec("x", "FP32", (-1,)),), (TensorSpec("y", "FP32", (-1,)),)
"""One input and one output."""
BATCHING = BatchPolicy()


def plain(name: str = "m", max_batch: int = 8, batching: BatchPolicy | None = BATCHING, **more: Any) -> ModelPolicy:
    """A model with one input `x` and one output `y`."""
    return ModelPolicy(name, 1, max_batch, *SPECS, batching, **more)


OUTPUTS = (TensorSpec("y", "FP32", (-1,)), TensorSpec("w", "FP32", (-1,)))


def model(
    name: str, max_batch: int, inputs: tuple[TensorSpec, ...], batching: BatchPolicy | None, **more: Any
) -> ModelPolicy:
    """A model with the outputs `y` and `w`, unless `more` has others."""
    return ModelPolicy(name, 1, max_batch, inputs, more.pop("outputs", OUTPUTS), batching, **more)


def step(model: str, source: str = "x", target: str = "y", mapped: str = "") -> StepPolicy:
    """A step that runs such a model."""
    return StepPolicy(model, 0, (("x", source),), (("y", target),), mapped=mapped)


def plain_mapped(name: str) -> ModelPolicy:
    """An ensemble that runs the model `m` for each row of its input."""
    tensors = (TensorSpec("x", "FP32", (-1, 1)),), (TensorSpec("y", "FP32", (-1, 1)),)
    return ModelPolicy(name, 1, 0, *tensors, steps=(step("m", mapped="x"),))


def nanoseconds(text: str) -> int:
    parts = re.fullmatch(r"([\d.]+)(us|ms|s)", text)
    assert parts, f"'{text}' is not a time; write 10s, 5ms or 300us"
    return round(float(parts[1]) * UNITS[parts[2]])


def policy_of(name: str, flags: tuple[str, ...], options: dict[str, str]) -> ModelPolicy:
    batching = None
    sequence = _sequence(flags, options) if "direct" in flags or "oldest" in flags else None
    if "single" not in flags and sequence is None:
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
    outputs = tuple(_tensor(text) for text in re.split(r",(?![^\[]*\])", options.get("outputs", "y")))
    version = int(options.get("version", 1))
    limit = nanoseconds(options["limit"]) if "limit" in options else None
    most = int(options.get("max_batch", 8))
    retry, decoupled = "no_retry" not in flags, "decoupled" in flags
    return ModelPolicy(
        name, version, most, inputs, outputs, batching, limit, retry, sequence=sequence, decoupled=decoupled,
        cached="cached" in flags, reads_device_memory="device" in flags, leaves_on_device="device" in flags,
        stays_loaded="stays" in flags,
        idle_unload_ns=nanoseconds(options["idle_unload"]) if "idle_unload" in options else None,
        padding=_padding(options["padding"]) if "padding" in options else None,
        prompt_inputs=("x",) if "prompts" in options else (), queue_tokens=int(options.get("prompts", 0)),
        streams=int(options.get("streams", 0)),
    )  # fmt: skip


def resource_of(text: str) -> Resource:
    """memory:4, or licence:1:shared"""
    name, count, *flags = text.split(":")
    return Resource(name, int(count), "shared" in flags)


def _padding(text: str) -> PaddingPolicy:
    """x or x|m, of which dim 0 is padded, with :lookahead4 :multiple8 :cost10"""
    names, *words = text.split(":")
    numbers = {word.rstrip("0123456789"): int(word.lstrip("abcdefghijklmnopqrstuvwxyz")) for word in words}
    inputs = tuple((name, (0,)) for name in names.split("|"))
    return PaddingPolicy(inputs, numbers.get("lookahead", 64), numbers.get("multiple", 1), numbers.get("cost", 10))


def _sequence(flags: tuple[str, ...], options: dict[str, str]) -> SequencePolicy:
    """direct utilization=0.5 or oldest candidates=4 preferred=2, both with idle=1s delay=10ms; iterative, strings,
    integers."""
    direct = "direct" in flags
    delay = nanoseconds(options.get("delay", "0s"))
    preferred = tuple(int(size) for size in options.get("preferred", "").split(",") if size)
    kinds = {"strings": IdControl("ID", "BYTES"), "integers": IdControl("ID", "UINT64")}
    return SequencePolicy(
        direct,
        max(1, int(options.get("max_batch" if direct else "candidates", 8 if direct else 1))),
        nanoseconds(options.get("idle", "1s")),
        delay if direct else 0,
        float(options.get("utilization", 0)),
        BatchPolicy() if direct else BatchPolicy(preferred, delay),
        "iterative" in flags,
        next((kinds[flag] for flag in flags if flag in kinds), None),
    )


def _queue(text: str) -> QueuePolicy:
    """reject:1s, delay:1s, with :override and :size4"""
    words = text.split(":") if text else ["reject"]
    size = [int(word.removeprefix("size")) for word in words if word.startswith("size")]
    times = [nanoseconds(word) for word in words if re.fullmatch(r"[\d.]+(us|ms|s)", word)]
    return QueuePolicy(TimeoutAction(words[0]), times[0] if times else 0, "override" in words, size[0] if size else 0)


def _tensor(text: str) -> TensorSpec:
    """x or x:[-1,4], with :optional, :ragged and :BOOL"""
    name, dims, *flags = text.split(":") if ":" in text else (text, "[-1]")
    numbers = tuple(int(dim) for dim in dims.strip("[]").split(",") if dim)
    dtype = "BOOL" if "BOOL" in flags else "FP32"
    return TensorSpec(name, dtype, numbers, "optional" in flags, "ragged" in flags)


def step_of(text: str) -> StepPolicy:
    """MODEL@VERSION(its_input:tensor,...)->(its_output:tensor,...), with /map:tensor and /if:tensor"""
    found = re.fullmatch(r"(\w+)(?:@(\d+))?\((.*)\)->\((.*?)\)((?:/\w+:\w+)*)", text)
    assert found, f"'{text}' is no step"
    added = dict(part.split(":") for part in found[5].split("/") if part)
    inputs, outputs = _pairs(found[3]), _pairs(found[4])
    return StepPolicy(found[1], int(found[2] or 0), inputs, outputs, added.get("map", ""), added.get("if", ""))


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    found = [part.partition(":") for part in text.split(",")]
    return tuple(sorted((own, name) for own, _, name in found))


def scaling_of(name: str, bounds: str, up: str = "50ms", down: str = "2s") -> ScalingPolicy:
    """`bounds`: 1-4. One group of CPU instances, `name`_0 and so on."""
    least, most = map(int, bounds.split("-"))
    specs = tuple(InstanceSpec(f"{name}_{index}") for index in range(most))
    return ScalingPolicy((ScaledGroup(name, least, most, specs),), nanoseconds(up), nanoseconds(down))
