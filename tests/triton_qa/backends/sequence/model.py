"""Stands in for Triton's test backend `sequence`: the sum of all elements of a sequence."""

import json
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"]).get("parameters", {})
        self.delay_s = float(parameters.get("execute_delay_ms", {}).get("string_value", 0)) / 1000
        self.sums = {}

    def execute(self, requests):
        threading.Event().wait(self.delay_s)
        return [self.answer(request) for request in requests]

    def answer(self, request):
        value, start = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT", "START"))
        sequence = request.correlation_id()
        total = value.sum() + (0 if start.any() else self.sums.get(sequence, 0))
        self.sums[sequence] = total
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.full(value.shape, total, np.int32))])
