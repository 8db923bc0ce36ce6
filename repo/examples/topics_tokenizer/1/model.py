"""Texts -> token ids and their mask. The package `tokenizers` takes all texts of a request at once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not help below hundreds of texts
from tokenizers import Tokenizer


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.tokenizer = Tokenizer.from_file(str(Path(__file__).parent / "tokenizer.json"))
        self.tokenizer.enable_truncation(int(parameters["max_tokens"]["string_value"]))
        self.tokenizer.enable_padding()  # to the longest text of the request

    def execute(self, requests):
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[:, 0]
            encoded = self.tokenizer.encode_batch_fast([text.decode(errors="replace") for text in texts])
            tensors = [
                pb_utils.Tensor("input_ids", np.array([text.ids for text in encoded], np.int64)),
                pb_utils.Tensor("attention_mask", np.array([text.attention_mask for text in encoded], np.int64)),
            ]
            responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
        return responses
