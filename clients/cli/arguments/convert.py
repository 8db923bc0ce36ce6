"""Arguments of the commands that make models of other models or describe them: convert, quantize, describe."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shmserve.clients.cli.arguments.common import add_command, add_json, at_least_0, at_least_1, positive
from shmserve.clients.cli.help import rare

PRECISIONS = ("int8", "int8-static", "fp16")


def add_convert(commands: Any) -> None:
    examples = """  shmserve convert net --from model.pt
  shmserve convert net --from models/net_savedmodel --shape x=1,224,224,3
  shmserve convert iris --from classifier.joblib --json
"""
    note = """
--from takes a TorchScript or torch.export file (.pt, .pt2), a SavedModel, a PaddlePaddle file (.pdmodel, .json beside
.pdiparams), a scikit-learn model (.joblib, .pkl), or the directory of such a model with its config.pbtxt. Both models
run in a temporary server. Loading a .joblib, .pkl or .pt2 file runs any code in it.
"""
    about = "make an ONNX model of another framework's model, and check that both answer the same"
    codes = ("written", "not written: the model cannot be converted, or the answers differ")
    command = add_command(commands, "convert", "convert", about, examples, codes, note)
    _add_conversion(command, "model file or directory: .pt, .pt2, .joblib, .pkl, .pdmodel, SavedModel")
    add = command.add_argument
    rare(add, "--opset", metavar="N", type=at_least_1, help="version of the ONNX operators (default: the converter's)")
    text = "largest difference of an output, as a share of its largest value (default: %(default)s)"
    add("--tolerance", metavar="SHARE", type=positive, default=1e-3, help=text)
    add_json(command)


def add_quantize(commands: Any) -> None:
    examples = """  shmserve quantize mlp_int8 --from models/mlp
  shmserve quantize net_fp16 --from model.onnx --precision fp16
  shmserve quantize net_int8 --from model.onnx --precision int8-static --input image=@photos.npy
"""
    note = """
int8 stores weights as 8-bit integers, and computes in them where ONNX Runtime can. int8-static also fixes the ranges of
values in between, from the rows of --input: give typical ones, as random ones say little. fp16 halves the file; it is
faster on GPUs, and slower on most CPUs. Both models run in a temporary server, and times include its messages.
"""
    about = "make a smaller ONNX model, and compare size, speed and answers"
    command = add_command(commands, "quantize", "convert", about, examples, ("written", "not written"), note)
    _add_conversion(command, "ONNX file, or model directory with one")
    text = "what the new model computes in (default: %(default)s)"
    command.add_argument("--precision", choices=PRECISIONS, default=PRECISIONS[0], help=text)
    add_json(command)


def _add_conversion(command: argparse.ArgumentParser, source: str) -> None:
    """The arguments of the commands that write a model directory."""
    add = command.add_argument
    add("name", metavar="NAME", help="name of the new model, and of its directory")
    add("--from", dest="source", metavar="FILE|DIR", required=True, help=source)
    text = "model repository, created if it does not exist (default: ./models)"
    add("--repository", metavar="DIR", type=Path, default=Path("models"), help=text)
    text = "input of the comparison, as for infer; repeat for several (default: random)"
    add("--input", metavar="NAME=VALUE", action="append", default=[], help=text)
    text = "shape of a random input, if 1 is too small for its variable dims"
    add("--shape", metavar="NAME=D1,D2,...", action="append", default=[], help=text)
    rare(add, "--seed", metavar="N", type=at_least_0, default=0, help="seed of the random inputs (default: 0)")


def add_describe(commands: Any) -> None:
    examples = """  shmserve describe models/mlp
  shmserve describe model.onnx --rows 1 --rows 32
  shmserve describe models/net --shape x=1,3,224,224 --json
"""
    note = """
The bound of a model is the time that its arithmetic takes at this machine's speed, or that reading its weights and
tensors from memory takes, whichever is longer. A real model is slower. Measuring the machine takes a few seconds.
"""
    about = "show a model's operators, parameters and FLOPs, and how fast this machine could run it"
    command = add_command(
        commands, "describe", "describe", about, examples, ("described", "the model cannot be read"), note
    )
    add = command.add_argument
    add("model", metavar="FILE|DIR", type=Path, help="ONNX file, or model directory with one")
    text = "rows of a batch; repeat for several (default: 1, 8 and 32 if the model can batch)"
    add("--rows", metavar="N", type=at_least_1, action="append", default=[], help=text)
    text = "shape of an input with variable dims; its first dim is replaced by the rows"
    add("--shape", metavar="NAME=D1,D2,...", action="append", default=[], help=text)
    add_json(command)
