"""Stands in for Triton's backend `repeat`: one response for each element of IN, each after its DELAY in ms."""

import json
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self.threads = []

    def execute(self, requests):
        for request in requests:
            values, delays, wait = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy().copy() for name in ("IN", "DELAY", "WAIT")
            )
            sender = request.get_response_sender()
            if values.shape != delays.shape:
                shapes = f"got {list(values.shape)} and {list(delays.shape)}"
                error = pb_utils.TritonError(f"expected IN and DELAY shape to match, {shapes}")
                sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
                continue
            self.threads.append(threading.Thread(target=self.answer, args=(sender, values, delays)))
            self.threads[-1].start()
            threading.Event().wait(float(wait.flat[0]) / 1000)

    def answer(self, sender, values, delays):
        for index, (value, delay) in enumerate(zip(values, delays, strict=True)):
            threading.Event().wait(float(delay) / 1000)
            outputs = [
                pb_utils.Tensor("OUT", np.array([value], np.int32)),
                pb_utils.Tensor("IDX", np.array([index], np.uint32)),
            ]
            sender.send(pb_utils.InferenceResponse(outputs), flags=0 if self.decoupled else FINAL)
            if not self.decoupled:  # the server would keep the first only
                break
        if self.decoupled or not len(values):
            sender.send(flags=FINAL)

    def finalize(self):
        for thread in self.threads:
            thread.join()
