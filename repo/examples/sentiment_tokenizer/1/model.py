"""Text -> the numbers of its words. A word is a run of letters and apostrophes; case is ignored."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

WORD = re.compile(r"[a-z']+")
LENGTH = 32


class TritonPythonModel:
    def initialize(self, args):
        words = (Path(__file__).parent / "words.txt").read_text(encoding="utf-8").split()
        self.numbers = {word: number for number, word in enumerate(words, 1)}

    def execute(self, requests):
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
            ids = np.zeros((len(texts), LENGTH), np.int64)
            for row, text in zip(ids, texts[:, 0], strict=True):
                numbers = [self.numbers.get(word, 0) for word in WORD.findall(text.decode(errors="replace").lower())]
                row[: len(numbers)] = numbers[:LENGTH]
            responses.append(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("WORDS", ids)]))
        return responses
