"""Writes a config.pbtxt with comments that explain its settings.

Invariant: a comment is "# text"; a setting that is turned off is "#setting", and is valid when its # is removed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from textwrap import TextWrapper
from typing import NamedTuple

from shmserve.dtypes import TO_CONFIG
from shmserve.repo.config.complete import TensorFacts
from shmserve.repo.parameters import EXECUTION_LIMIT

_HEAD = """\
# Configuration of the model '{name}'. docs/repository.md describes all fields.
# Lines like "#setting: 1" are settings that are turned off: to use one, remove the #.
# `shmserve check` finds mistakes. A server that is started with --model-control-mode poll follows changes.
"""
_BATCHES = """
# The most rows that run together. Tensors have a dimension for the rows in front, which `dims` below leave out.
# 0: requests run one at a time, and `dims` are complete.
max_batch_size: {rows}
"""
_NO_BATCHES = """
# 0: requests run one at a time, and `dims` are complete. Above 0: the most rows that run together; tensors then have a
# dimension for the rows in front, which `dims` leave out. {why}
max_batch_size: 0
"""
_TENSORS = """
# The tensors that a request has, and those of its response. In `dims`, -1 stands for any size.{more}
"""
_QUEUE = """
# How requests that wait become a batch. As it is, they run as soon as an instance is idle, as many as there are.
dynamic_batching {
  # Wait up to this long for more requests: larger batches, at the cost of latency.
  #max_queue_delay_microseconds: 500

  # Batch sizes that the model runs best; a delay ends when one is reached.
  #preferred_batch_size: [ 4, 8 ]

  # Limits of the queue: refuse requests beyond so many, and those that have waited for so long.
  #default_queue_policy { max_queue_size: 1000 default_timeout_microseconds: 1000000 timeout_action: REJECT }
}
"""
_INSTANCES = """
# Processes that run the model. More of them use more cores and more memory. `shmserve tune` finds a number for this and
# for batches.
instance_group [ { count: 1 kind: KIND_CPU } ]

# On GPUs:
#instance_group [ { count: 1 kind: KIND_GPU gpus: [ 0 ] } ]
"""
_VERSIONS = """
# Which of the directories 1, 2, ... are served. Without this, the highest.
#version_policy { latest { num_versions: 2 } }
#version_policy { specific { versions: [ 1 ] } }
"""
_CACHE = """
# Answer repeated requests from memory. The server needs --cache-config local,size=104857600 for it.
#response_cache { enable: true }
"""
_WARMUP = """
# Run the model before it is ready, so that the first caller does not wait for what happens only once.
#model_warmup [ { name: "first" batch_size: 1 %s } ]
"""
_PARAMETER = 'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}'
_COMMENT = TextWrapper(width=120, subsequent_indent="# ", break_long_words=False, break_on_hyphens=False)
_SIDE = 224
_LENGTH = 16


class CommentedParameter(NamedTuple):
    comment: str
    key: str
    value: str
    off: bool = False


_LIMIT = CommentedParameter(EXECUTION_LIMIT.help, EXECUTION_LIMIT.name, "20", off=True)


class Layout(NamedTuple):
    """What the file says. `rows`: max_batch_size. `tensors` without tensors: the server completes them. `note`:
    sentences about the tensors. `no_batches`: why `rows` is 0."""

    backend: str
    runs: str
    rows: int
    inputs: Sequence[TensorFacts] = ()
    outputs: Sequence[TensorFacts] = ()
    note: str = ""
    no_batches: str = ""
    parameters: Sequence[CommentedParameter] = ()


def config_text(name: str, layout: Layout) -> str:
    """`dims` of the layout's tensors have no dimension for rows."""
    return "".join(_parts(name, layout))


def example(dims: Sequence[int]) -> list[int]:
    """Sizes that a model is likely to take: of an image if it looks like one, of a signal with channels, else 1."""
    free = sum(dim < 0 for dim in dims)
    size = {(3, 2): _SIDE, (2, 1): _LENGTH}.get((len(dims), free), 1)
    return [size if dim < 0 else dim for dim in dims]


def _parts(name: str, layout: Layout) -> Iterator[str]:
    yield _HEAD.format(name=name)
    yield f"name: {_quoted(name)}\n\n# The engine. It runs {layout.runs}.\nbackend: {_quoted(layout.backend)}\n"
    yield _BATCHES.format(rows=layout.rows) if layout.rows else _wrapped(_NO_BATCHES.format(why=layout.no_batches))
    note = f" {layout.note}" if layout.note else ""
    yield _wrapped(_TENSORS.format(more=note))
    for kind, tensors in (("input", layout.inputs), ("output", layout.outputs)):
        if tensors:
            yield f"{kind} [\n{_entries(tensors)}\n]\n"
    if layout.rows:
        yield _QUEUE
    yield _INSTANCES
    for parameter in (*layout.parameters, _LIMIT):
        line = _PARAMETER.format(key=parameter.key, value=parameter.value)
        yield _wrapped(f"\n# {parameter.comment}\n") + f"{'#' if parameter.off else ''}{line}\n"
    if layout.inputs:
        yield _WARMUP % " ".join(map(_sample, layout.inputs))
    yield _VERSIONS + _CACHE


def _entries(tensors: Sequence[TensorFacts]) -> str:
    return ",\n".join(f"  {{ {_entry(tensor)} }}" for tensor in tensors)


def _entry(tensor: TensorFacts) -> str:
    text = f"name: {_quoted(tensor.name)} data_type: {TO_CONFIG[tensor.dtype]}"
    if tensor.dims:
        return f"{text} dims: {_dims(tensor.dims)}"
    return f"{text} dims: [ 1 ] reshape {{ shape: [ ] }}"  # a scalar of the model, or of each row


def _sample(tensor: TensorFacts) -> str:
    dims = _dims(example(tensor.dims or (1,)))
    data = "zero_data" if tensor.dtype == "BYTES" else "random_data"
    value = f"{{ data_type: {TO_CONFIG[tensor.dtype]} dims: {dims} {data}: true }}"
    return f"inputs {{ key: {_quoted(tensor.name)} value: {value} }}"


def _dims(dims: Sequence[int]) -> str:
    return f"[ {', '.join(map(str, dims))} ]"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _wrapped(text: str) -> str:
    """The text with its comments wrapped, paragraph by paragraph, at the width of the other files."""
    lines: list[str] = []
    for line in text.split("\n"):
        if line.startswith("# ") and lines and lines[-1].startswith("# ") and not lines[-1].endswith(":"):
            lines[-1] += line[1:]
        else:
            lines.append(line)
    return "\n".join(_COMMENT.fill(line) if line.startswith("# ") else line for line in lines)
