"""Probabilities -> label and probability of the most likely class; the first one if several are equally likely."""

from __future__ import annotations

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.labels = np.array(parameters["labels"]["string_value"].encode().split(), np.object_)

    def execute(self, requests):
        responses = []
        for request in requests:
            scores = pb_utils.get_input_tensor_by_name(request, "SCORES").as_numpy()
            best = scores.argmax(axis=1)[:, None]
            tensors = [
                pb_utils.Tensor("LABEL", self.labels[best]),
                pb_utils.Tensor("SCORE", np.take_along_axis(scores, best, axis=1)),
            ]
            responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
        return responses
