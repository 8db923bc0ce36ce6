"""The models of the browser tests. A test can compute the response of each."""

from __future__ import annotations

from pathlib import Path

from tests.support.ensemble_models import ensemble, tensors
from tests.support.model_files import python_model, write_model

TALKER = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            words = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            if b"fail" in words:
                raise ValueError("it was told to fail")
            for at in range(len(words)):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", words[at : at + 1])]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
"""Responds with the words of the request, one after another."""
LABELS = ("red", "green", "blue")
HOSTILE = "<img id=injected src=x onerror=alert(1)> & 'no'"


def _config(x: str, y: str, more: str = "") -> str:
    return f'backend: "python" {more} input {tensors(f"x:{x}")} output {tensors(f"y:{y}")}'


def write_models(repository: Path) -> None:
    numbers, words, pixels = "FP32:[2]", "STRING:[-1]", "UINT8:[-1,-1,3]"
    identity = _config(numbers, numbers, "max_batch_size: 8 dynamic_batching { }").replace("python", "identity")
    write_model(repository, "numbers", identity)
    write_model(repository, "words", _config(words, words).replace("python", "identity"))
    # The share of each colour in a picture. Only with the right layout are these the colours of the picture.
    shares = 'FP32:[3]:label_filename: "labels.txt"'
    colours = _config("FP32:[3,32,24]:format: FORMAT_NCHW", shares, "max_batch_size: 4")
    write_model(repository, "colours", colours, python_model("return self.respond(x.mean((2, 3)))"))
    (repository / "colours" / "labels.txt").write_text("\n".join(LABELS) + "\n")
    write_model(repository, "negative", _config(pixels, pixels), python_model("return self.respond(255 - x)"))
    failing = (
        f"if x.ravel()[0] == -1:\n    raise ValueError({HOSTILE!r})\n"
        "if x.ravel()[0] < -1:\n    os.abort()\nreturn self.respond(x)"
    )
    write_model(repository, "moody", _config(numbers, numbers, "max_batch_size: 8"), python_model(failing))
    decoupled = "model_transaction_policy { decoupled: true }"
    write_model(repository, "talker", _config(words, words, decoupled), TALKER)
    steps = ("numbers(x:x)->(y:middle)", "moody(x:middle)->(y:y)")
    ensemble(repository, "pipeline", "x:FP32:[2]", "y:FP32:[2]", *steps, more="max_batch_size: 8")
