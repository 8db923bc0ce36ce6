"""Models that call models, for the tests of a worker. The request parameter `wish` selects what they do."""

from __future__ import annotations

from tests.support.model_files import python_model

CALLER = """\
import asyncio
import json
import os
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        if json.loads(requests[0].parameters()).get("batch") == "async":
            return self.soon(requests)
        return [self.one(request) for request in requests]

    def one(self, request):
        wish = json.loads(request.parameters()).get("wish", "pass_on")
        return getattr(self, wish)(request)

    def ask(self, inputs, **how):
        return pb_utils.InferenceRequest(model_name="other", requested_output_names=["b"], inputs=inputs, **how)

    def pass_on(self, request):
        return self.checked(self.ask([pb_utils.Tensor("a", request.inputs()[0].as_numpy())]).exec())

    def checked(self, response):
        if response.has_error():
            raise pb_utils.TritonModelException(f"{response.error().code()}: {response.error().message()}")
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", response.output_tensors()[0].as_numpy())])

    def part(self, request):
        return self.checked(self.ask([pb_utils.Tensor("a", request.inputs()[0].as_numpy()[:, 100:3000])]).exec())

    def computed(self, request):
        return self.checked(self.ask([pb_utils.Tensor("a", request.inputs()[0].as_numpy() + 1)]).exec())

    def said(self, request):
        made = self.ask(
            request.inputs(), request_id="r", correlation_id="c", model_version=3, flags=1, timeout=70,
            parameters={"k": 1}, trace=request.trace(), priority=2,
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 0),
        )
        assert json.loads(request.trace().get_context()) == {"traceparent": "00-1-2-01"}
        response = made.exec()
        assert json.loads(response.parameters()) == {"said": True}
        return self.checked(response)

    def drop(self, request):
        response = self.ask([]).exec()
        total = response.output_tensors()[0].as_numpy().sum()
        del response
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full((1, 1), total, np.float32))])

    def strings(self, request):
        response = self.ask([pb_utils.Tensor("s", np.array([b"x", "y"], object))]).exec()
        found = b" ".join(response.output_tensors()[0].as_numpy())
        assert found == b"one two", found
        return self.zeros()

    def parts(self, request):
        responses = self.ask([]).exec(decoupled=True)
        found = [response for response in responses]
        assert [one for one in responses] == found, "a second loop gives them again"
        total = sum(float(tensor.as_numpy().sum()) for one in found for tensor in one.output_tensors())
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[len(found), total]], np.float32))])

    def forked(self, request):
        child = os.fork()
        if not child:
            code = 1
            try:
                assert not request.is_cancelled()
                for wish in (self.ask([]).exec, lambda: pb_utils.is_model_ready("other"), self.count):
                    try:
                        wish()
                    except pb_utils.TritonModelException as error:
                        assert "a process that the model has forked" in str(error), error
                    else:
                        raise AssertionError(f"{wish} raised nothing")
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return self.pass_on(request)

    def count(self):
        pb_utils.MetricFamily("forks", "", pb_utils.MetricFamily.COUNTER).Metric()

    def large_parts(self, request):
        responses = self.ask([]).exec(decoupled=True)
        for _ in responses:
            pass
        return self.checked(next(iter(responses)))

    def few_parts(self, request):
        responses = self.ask([]).exec(decoupled=True)
        first = next(responses).output_tensors()[0].as_numpy()
        if json.loads(request.parameters()).get("cancel"):
            responses.cancel()
            (last,) = responses
            assert last.error().code() == pb_utils.TritonError.CANCELLED, last.error().message()
            responses.cancel()
            assert next(responses, None) is None
        del responses
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", first.reshape(1, -1))])

    def threads(self, request):
        found = [None] * 4

        def call(number):
            array = np.full((1, 1), number, np.float32)
            found[number] = self.ask([pb_utils.Tensor("a", array)]).exec().output_tensors()[0].as_numpy()

        threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.concatenate(found, axis=1))])

    def own_loop(self, request):
        return asyncio.run(self.gathered(request))

    async def gathered(self, request):
        arrays = [np.full((1, 1), number, np.float32) for number in range(4)]
        calls = [self.ask([pb_utils.Tensor("a", array)]).async_exec() for array in arrays]
        found = [response.output_tensors()[0].as_numpy() for response in await asyncio.gather(*calls)]
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.concatenate(found, axis=1))])

    async def soon(self, requests):
        return [await self.gathered(request) for request in requests]

    def control(self, request):
        assert pb_utils.is_model_ready("other")
        assert not pb_utils.is_model_ready("other", "2")
        pb_utils.load_model("other", config='{"backend": "x"}', files={"file:1/model.py": b"a" * 150_000})
        pb_utils.unload_model("other", unload_dependents=True)
        return self.zeros()

    def refused(self, request):
        pb_utils.load_model("none")

    def background(self, request):
        self.released, self.heard = threading.Event(), threading.Event()
        threading.Thread(target=self.call_later).start()
        return self.zeros()

    def call_later(self):
        self.released.wait()
        self.found = self.ask([pb_utils.Tensor("a", np.ones((1, 5000), np.float32))]).exec()
        self.heard.set()

    def released_now(self, request):
        self.released.set()
        return self.zeros()

    def heard_later(self, request):
        self.heard.wait()
        found, self.found = self.found.output_tensors()[0], None
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", found.as_numpy())])

    def zeros(self):
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.zeros((1, 1), np.float32))])

    def unsayable(self, request):
        pb_utils.InferenceRequest(model_name="m" * 200, requested_output_names=[], inputs=[]).exec()

    def came(self, request):
        request.exec()
"""

LOADING = python_model(
    "return self.respond(x)", 'if not pb_utils.is_model_ready("other"):\n    pb_utils.load_model("other")'
)
