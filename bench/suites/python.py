"""The overhead of a Python model beyond its own function: add_sub of 1 MiB tensors, and a model that calls it.

The same two lines of numpy run in the model and bare, so the difference is the overhead. The model reads the caller's
memory, its outputs are copied once, and a call copies nothing.
"""

from __future__ import annotations

from statistics import median

from bench.lib import models
from bench.lib.child import Answer, Child, Handler
from bench.lib.clock import alternate, durations, summary
from bench.lib.setting import Setting, serving
from bench.lib.table import Row, micros

ELEMENTS = 1 << 18
"""FP32 elements: 1 MiB."""
IN = {"a": ("FP32", [-1]), "b": ("FP32", [-1])}
OUT = {"sum": ("FP32", [-1]), "difference": ("FP32", [-1])}

ADD_SUB = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("a", "b"))
        outputs = [pb_utils.Tensor("sum", a + b), pb_utils.Tensor("difference", a - b)]
        return pb_utils.InferenceResponse(outputs)
"""

STACKED = """\
class TritonPythonModel:
    def execute(self, inputs):
        a, b = inputs["a"], inputs["b"]
        return {"sum": a + b, "difference": a - b}
"""

CALLER = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        call = pb_utils.InferenceRequest(
            model_name="add_sub", inputs=request.inputs(), requested_output_names=["sum", "difference"]
        )
        return call.exec()
"""
WAYS = ("plain", "add_sub", "stacked", "caller")


def python(setting: Setting) -> list[Row]:
    """add_sub of 1 MiB tensors in a Python model, compared with the plain function; stacked; and called by another
    model.
    """
    repository = setting.repository("python")
    for name, source, parameters in (
        ("add_sub", ADD_SUB, {}),
        ("stacked", STACKED, {"stacked": "true"}),
        ("caller", CALLER, {}),
    ):
        model = models.Model("python", IN, OUT, parameters=parameters)
        models.write(repository, name, model, {"model.py": source})
    with serving(repository) as server, Child("bench.suites.python:asks", url=server.lane) as child:
        parties = [
            lambda what=what: float(child.ask(seconds=setting.seconds / 2, what=what)["median_us"]) for what in WAYS
        ]
        plain, direct, stacked, caller = (median(values) for values in alternate(setting.rounds, *parties))
    return [
        Row("python add_sub, 1 MiB, over plain", direct / plain, "x", beside=_beside(direct, plain)),
        Row("python add_sub, stacked, over plain", stacked / plain, "x", beside=_beside(stacked, plain)),
        Row("python add_sub, by a call, over direct", caller / direct, "x", beside=_beside(caller, direct)),
    ]


def _beside(time: float, other: float) -> str:
    return f"{micros(time)} against {micros(other)}"


def asks(url: str) -> Handler:
    import numpy as np

    from shmserve import Client

    client = Client(url)
    random = np.random.default_rng(models.SEED)
    provided = {name: client.empty((ELEMENTS,), "float32") for name in ("a", "b")}
    for array in provided.values():
        array[...] = random.random(ELEMENTS, np.float32)
    a, b = provided["a"], provided["b"]

    def plain() -> dict[str, np.ndarray]:
        return {"sum": a + b, "difference": a - b}

    def handle(seconds: float, what: str) -> Answer:
        call = plain if what == "plain" else lambda: client.infer(what, provided)
        result = call()
        assert np.array_equal(result["sum"], a + b)
        assert np.array_equal(result["difference"], a - b)
        del result
        return summary(durations(call, seconds, warm=10))

    return handle
