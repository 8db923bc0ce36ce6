"""Stands in for Triton's test backend `dyna_sequence`: the sum over a sequence, plus its id with the last request."""

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
        value, start, end, sequence = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT", "START", "END", "CORRID")
        )
        number = int(sequence.flat[0])
        total = value.sum(axis=1, keepdims=True) + (0 if start.any() else self.sums.get(number, 0))
        self.sums[number] = total
        if end.any():
            total = total + np.int32(number)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", total)])
