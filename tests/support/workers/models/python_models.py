"""Python models for the tests of complete servers: they call other models, query the server, count and log."""

from __future__ import annotations

from tests.support.model_files import python_model

LEAF = """\
import json

import numpy
import triton_python_backend_utils as pb_utils

copied = []
copy = numpy.copyto


def copyto(target, source, **how):
    copied.append(source.nbytes)
    copy(target, source, **how)


numpy.copyto = copyto


def is_shared(array):
    while isinstance(array.base, numpy.ndarray):
        array = array.base
    return type(array.base).__name__ == "ArrayHold"


class TritonPythonModel:
    def initialize(self, args):
        family = pb_utils.MetricFamily("leaf_requests", "how often", pb_utils.MetricFamily.COUNTER)
        self.count = family.Metric({"instance": args["model_instance_name"]})
        self.all = family.Metric()

    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        self.count.increment(1)
        self.all.increment(1)
        x = request.inputs()[0].as_numpy()
        before = list(copied)
        copied.clear()
        said = {"shared": is_shared(x), "copied": json.dumps(before)}
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x * 2)], parameters=said)
"""

CALLER = python_model("""
call = pb_utils.InferenceRequest(
    model_name="leaf", requested_output_names=["y"], inputs=[pb_utils.Tensor("x", x)]
)
return pb_utils.InferenceResponse(call.exec().output_tensors())
""")

GATHER = """\
import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        found = await asyncio.gather(*[self.one(request) for request in requests])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", array)]) for array in found]

    async def one(self, request):
        calls = [
            pb_utils.InferenceRequest(model_name=name, requested_output_names=["y"], inputs=request.inputs())
            for name in ("leaf", "caller")
        ]
        first, second = await asyncio.gather(*[call.async_exec() for call in calls])
        return first.output_tensors()[0].as_numpy() + second.output_tensors()[0].as_numpy()
"""

MANY = """\
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for value in request.inputs()[0].as_numpy()[0]:
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", value.reshape(1, 1))]))
            sender.send(flags=FINAL)
"""

SUMS = """\
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,)).start()

    def answer(self, request):
        sender = request.get_response_sender()
        total = 0
        call = pb_utils.InferenceRequest(model_name="many", requested_output_names=["y"], inputs=request.inputs())
        for response in call.exec(decoupled=True):
            if not response.output_tensors():
                break
            total += response.output_tensors()[0].as_numpy()
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", total)]))
        sender.send(flags=FINAL)
"""

WIDE = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def stream(self, request):
        for number in range(int(request.inputs()[0].as_numpy()[0, 0])):
            yield pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full((1, 5000), number, np.float32))])
"""

RELAY = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def stream(self, request):
        call = pb_utils.InferenceRequest(model_name="wide", requested_output_names=["y"], inputs=request.inputs())
        async for response in await call.async_exec(decoupled=True):
            if response.output_tensors():
                yield response
"""

CONTROL = python_model(
    """
before = pb_utils.is_model_ready("spare")
(pb_utils.unload_model if before else pb_utils.load_model)("spare")
return self.respond(np.array([[before, pb_utils.is_model_ready("spare")]], np.float32))
""",
    """
assert pb_utils.is_model_ready("leaf")
x = pb_utils.Tensor("x", np.ones((1, 5000), np.float32))
call = pb_utils.InferenceRequest(model_name="leaf", requested_output_names=["y"], inputs=[x])
assert (call.exec().output_tensors()[0].as_numpy() == 2).all()
""",
)

STACKED = """\
class TritonPythonModel:
    def execute(self, inputs):
        return {"y": inputs["x"] + len(inputs["x"])}
"""


READY = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.said = "yes"

    async def is_ready(self):
        if self.said == "raise":
            raise ValueError("it broke")
        return {"yes": True, "no": False, "one": 1}[self.said]

    def execute(self, requests):
        self.said = {1: "yes", 2: "no", 3: "one", 4: "raise"}[int(requests[0].inputs()[0].as_numpy()[0, 0])]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""
