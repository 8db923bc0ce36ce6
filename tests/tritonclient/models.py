"""Writes the models that the published example programs of `tritonclient` call, with the names and tensors that those
programs expect and the outputs that they check. They are test fixtures, not samples for users.

Run `python -m tests.tritonclient.models DEST [NAME ...]`. Each model is a configuration and at most one short Python
file, in Triton's format without extensions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.support.ensemble_models import config_text

_OF_ONE_REQUEST = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]
"""
"""Beginning of a model.py that answers each request on its own; the method `answer` follows."""

ADD_SUB = f"""\
import numpy as np
{_OF_ONE_REQUEST}
    def answer(self, request):
        a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT0", "INPUT1"))
        outputs = {{"OUTPUT0": np.add(a, b), "OUTPUT1": np.subtract(a, b)}}
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in outputs.items()])
"""

ADD_SUB_OF_TEXT = f"""\
import numpy as np
{_OF_ONE_REQUEST}
    def answer(self, request):
        texts = [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT0", "INPUT1")]
        a, b = (text.astype(np.int64) for text in texts)
        outputs = {{"OUTPUT0": a + b, "OUTPUT1": a - b}}
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, value.astype(np.bytes_).astype(object)) for name, value in outputs.items()]
        )
"""

SEQUENCE = f"""\
{_OF_ONE_REQUEST}
    def answer(self, request):
        \"\"\"What came, and one more with the first of a sequence.\"\"\"
        value, start = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT", "START"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", value + start)])
"""

DYNA_SEQUENCE = f"""\
import numpy as np
{_OF_ONE_REQUEST}
    def answer(self, request):
        \"\"\"What came, one more with the first of a sequence, and its number more with the last.\"\"\"
        value, start, end, sequence = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT", "START", "END", "CORRID")
        )
        output = value + start + end * sequence.astype(np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", output)])
"""

STRING_DYNA_SEQUENCE = f"""\
import numpy as np
{_OF_ONE_REQUEST}
    def initialize(self, args):
        self.sums = {{}}

    def answer(self, request):
        \"\"\"The sum of what came so far, and with the last of a sequence its number more, which came as text.\"\"\"
        value, start, end, sequence = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT", "START", "END", "CORRID")
        )
        number = int(sequence.flat[0])
        total = value if start.any() else self.sums[number] + value
        self.sums[number] = total
        if end.any():
            del self.sums[number]
            total = total + np.int32(number)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", total)])
"""

REPEAT = """\
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    \"\"\"Each element of IN is an answer, so many milliseconds after the one before as DELAY says; WAIT is how long
    the model keeps others waiting.\"\"\"

    def initialize(self, args):
        self.clock = threading.Event()
        self.answering = []

    def execute(self, requests):
        for request in requests:
            values, delays, wait = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy().copy() for name in ("IN", "DELAY", "WAIT")
            )
            sender = request.get_response_sender()
            self.answering = [thread for thread in self.answering if thread.is_alive()]
            self.answering.append(threading.Thread(target=self.answer, args=(sender, values, delays)))
            self.answering[-1].start()
            self.clock.wait(float(wait[0]) / 1000)

    def answer(self, sender, values, delays):
        for number, (value, delay) in enumerate(zip(values, delays, strict=True)):
            self.clock.wait(float(delay) / 1000)
            if sender.is_cancelled():
                break
            outputs = [
                pb_utils.Tensor("OUT", np.array([value], np.int32)),
                pb_utils.Tensor("IDX", np.array([number], np.uint32)),
            ]
            sender.send(pb_utils.InferenceResponse(outputs))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self):
        self.clock.set()
        for thread in self.answering:
            thread.join()
"""

_DIRECT = "max_sequence_idle_microseconds: 5000000"
_OLDEST = f"{_DIRECT} oldest {{ max_candidate_sequences: 32 }}"
"""Fields of `sequence_batching` that select a strategy; the strategy `direct` is the default."""
BATCHED = "max_batch_size: 8"


class ClientModel(NamedTuple):
    config: str
    source: str
    """Source of model.py; "": an identity model."""


def _model(inputs: str, outputs: str, source: str = "", more: str = BATCHED) -> ClientModel:
    more += " instance_group [ { count: 1 kind: KIND_CPU } ]"
    return ClientModel(config_text("python" if source else "identity", inputs, outputs, more), source)


def _pair(dtype: str, source: str, more: str = "") -> ClientModel:
    """An add_sub model: two inputs and two outputs of this data type."""
    inputs, outputs = (" ".join(f"{name}{number}:{dtype}:[16]" for number in (0, 1)) for name in ("INPUT", "OUTPUT"))
    return _model(inputs, outputs, source, f"{BATCHED} {more}")


def _sequence(source: str, strategy: str, number: str = "") -> ClientModel:
    """A sequence model. `number`: the data type of the sequence id, for a model that also has the controls END and
    CORRID; "": it has neither.
    """
    controls = [
        f'{{ name: "{kind}" control [ {{ kind: CONTROL_SEQUENCE_{kind} int32_false_true: [ 0, 1 ] }} ] }}'
        for kind in (("START", "END", "READY") if number else ("START", "READY"))
    ]
    if number:
        kind = f"kind: CONTROL_SEQUENCE_CORRID data_type: {number}"
        controls.append(f'{{ name: "CORRID" control [ {{ {kind} }} ] }}')
    more = f"{BATCHED} sequence_batching {{ {strategy} control_input [ {', '.join(controls)} ] }}"
    return _model("INPUT:INT32:[1]", "OUTPUT:INT32:[1]", source, more)


MODELS = {
    "simple": _pair("INT32", ADD_SUB, "dynamic_batching { }"),
    "simple_int8": _pair("INT8", ADD_SUB),
    "simple_string": _pair("STRING", ADD_SUB_OF_TEXT),
    "simple_identity": _model("INPUT0:STRING", "OUTPUT0:STRING"),
    "simple_sequence": _sequence(SEQUENCE, _DIRECT),
    "simple_dyna_sequence": _sequence(DYNA_SEQUENCE, _OLDEST, "TYPE_UINT64"),
    "simple_string_dyna_sequence": _sequence(STRING_DYNA_SEQUENCE, _OLDEST, "TYPE_STRING"),
    "repeat_int32": _model(
        "IN:INT32 DELAY:UINT32 WAIT:UINT32:[1]", "OUT:INT32:[1] IDX:UINT32:[1]", REPEAT,
        "model_transaction_policy { decoupled: true }",
    ),
    "custom_identity_int32": _model("INPUT0:INT32", "OUTPUT0:INT32"),
}  # fmt: skip


def build(dest: Path, names: Iterable[str] = MODELS) -> list[str]:
    """Write these models to `dest` and return their names; existing files are overwritten."""
    written = []
    for name in names:
        model = MODELS[name]
        folder = dest / name / "1"
        folder.mkdir(parents=True, exist_ok=True)
        (folder.parent / "config.pbtxt").write_text(f'name: "{name}" {model.config}')
        if model.source:
            (folder / "model.py").write_text(model.source)
        written.append(name)
    return written


def main(arguments: list[str]) -> int:
    if not arguments or not set(arguments[1:]) <= set(MODELS):
        print(f"usage: python -m tests.tritonclient.models DEST [{' | '.join(MODELS)}] ...", file=sys.stderr)
        return 2
    for name in build(Path(arguments[0]), arguments[1:] or MODELS):
        print(f"  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
