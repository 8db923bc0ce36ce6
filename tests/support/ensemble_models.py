"""Ensembles and their models, written in a short notation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.model_files import parameters, python_model, write_model

ADD = python_model(
    """
    if (x == 666).any():
        return pb_utils.InferenceResponse(error=pb_utils.TritonError("666 is refused"))
    if self.term == 1 and (x == 777).any():
        select.select([], [], [])
    return self.respond(x + self.term)
    """,
    'self.term = int("".join(filter(str.isdigit, args["model_name"])) or 1)',
)
"""Adds the number in its name. Fails if an element is 666; `*1` hangs if one is 777."""
BATCHES = "max_batch_size: 64 dynamic_batching { }"
TENSOR = '{{ name: "{name}" data_type: TYPE_{kind} dims: {dims} {more} }}'


def tensors(*texts: str) -> str:
    """Tensors of a configuration: x, x:BOOL, x:FP32:[-1,3] or x:FP32:[4]:reshape{shape:[2,2]}."""
    found = []
    for text in texts:
        name, kind, dims, more = (*text.split(":", 3), *("", "", "")[text.count(":") :])
        found.append(TENSOR.format(name=name, kind=kind or "FP32", dims=dims or "[-1]", more=more))
    return "[" + ", ".join(found) + "]"


def config_text(backend: str, inputs: str, outputs: str, more: str = "") -> str:
    """The configuration of a model, with its tensors in this notation."""
    return f'backend: "{backend}" input {tensors(*inputs.split())} output {tensors(*outputs.split())} {more}\n'


def model(
    root: Path, name: str, source: str = "", more: str = "", outputs: tuple[str, ...] = ("y",), dims: str = ""
) -> None:
    """Writes a Python model, or an identity if there is no source."""
    config = config_text("python" if source else "identity", f"x:FP32:{dims}", " ".join(outputs), more)
    write_model(root, name, config, source)


def steps(*texts: str) -> str:
    """Steps of a configuration: MODEL(input:tensor,...)->(output:tensor,...)/map:tensor/if:tensor."""
    found, added = [], []
    for index, text in enumerate(texts):
        match = re.fullmatch(r"(\w+)\((.*)\)->\((.*?)\)(.*)", text)
        assert match
        maps = [
            f'{field} {{ key: "{own}" value: "{tensor}" }}'
            for field, pairs in (("input_map", match[2]), ("output_map", match[3]))
            for own, _, tensor in (pair.partition(":") for pair in pairs.split(","))
        ]
        found.append(f'{{ model_name: "{match[1]}" model_version: -1 {" ".join(maps)} }}')
        for what, tensor in re.findall(r"/(\w+):(\w+)", match[4]):
            added.append(parameters(**{f"step[{index}].{what}": tensor}))
    return f"ensemble_scheduling {{ step [ {', '.join(found)} ] }} {' '.join(added)}"


def ensemble(root: Path, name: str, inputs: str, outputs: str, *texts: str, more: str = "") -> None:
    config = f'platform: "ensemble" {more} input {tensors(*inputs.split())} output {tensors(*outputs.split())} '
    write_model(root, name, config + steps(*texts))


def numbers(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(5).integers(-500, 500, shape).astype(np.float32)
