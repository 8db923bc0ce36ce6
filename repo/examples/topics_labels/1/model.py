"""Embeddings of texts -> the closest label, and its value of softmax(sharpness x cosine similarity) over all labels."""

from __future__ import annotations

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        labels = parameters["labels"]["string_value"].split()
        describe = parameters["description"]["string_value"].format
        self.labels = np.array([label.encode() for label in labels], np.object_)
        self.descriptions = np.array([[describe(label).encode()] for label in labels], np.object_)
        self.sharpness = float(parameters["sharpness"]["string_value"])
        self.embedded = None

    def execute(self, requests):
        if self.embedded is None:  # not in `initialize`: the other models may still be loading then
            words = self.called("topics_tokenizer", [pb_utils.Tensor("TEXT", self.descriptions)])
            self.embedded = self.called("topics_encoder", words)[0].as_numpy().copy()
        return [self.answer(request) for request in requests]

    def answer(self, request):
        embedding = pb_utils.get_input_tensor_by_name(request, "EMBEDDING").as_numpy()
        logits = self.sharpness * (embedding @ self.embedded.T)
        powers = np.exp(logits - logits.max(1, keepdims=True))
        best = logits.argmax(1)[:, None]
        scores = np.take_along_axis(powers, best, 1) / powers.sum(1, keepdims=True)
        tensors = [pb_utils.Tensor("LABEL", self.labels[best]), pb_utils.Tensor("SCORE", scores)]
        return pb_utils.InferenceResponse(output_tensors=tensors)

    def called(self, model, inputs):
        names = {"topics_tokenizer": ["input_ids", "attention_mask"], "topics_encoder": ["EMBEDDING"]}[model]
        call = pb_utils.InferenceRequest(model_name=model, inputs=inputs, requested_output_names=names)
        response = call.exec()
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        return [pb_utils.get_output_tensor_by_name(response, name) for name in names]
