"""Converts the recogniser's outputs to texts with their scores and boxes. Drops lines with a low score.

Decoding is greedy CTC: take the most likely character of each step, then remove repeats and blanks.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

BLANK = 0


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.min_score = float(parameters["min_score"]["string_value"])
        text = (Path(__file__).parent / "characters.txt").read_text(encoding="utf-8")
        self.characters = ["", *text.removesuffix("\n").split("\n"), " "]

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        steps = pb_utils.get_input_tensor_by_name(request, "STEPS").as_numpy()
        boxes = pb_utils.get_input_tensor_by_name(request, "BOXES").as_numpy()
        texts = [self._read(line) for line in steps]
        kept = [index for index, (_, score) in enumerate(texts) if score >= self.min_score]
        tensors = [
            pb_utils.Tensor("TEXT", np.array([texts[index][0].encode() for index in kept], np.object_)),
            pb_utils.Tensor("SCORE", np.array([texts[index][1] for index in kept], np.float32)),
            pb_utils.Tensor("BOX", boxes[kept]),
        ]
        return pb_utils.InferenceResponse(output_tensors=tensors)

    def _read(self, steps):
        best = steps.argmax(axis=1)
        new = np.ones(len(best), bool)
        new[1:] = best[1:] != best[:-1]
        chosen = np.flatnonzero(new & (best != BLANK))
        if not len(chosen):
            return "", 0.0
        return "".join(self.characters[index] for index in best[chosen]), float(steps[chosen, best[chosen]].mean())
