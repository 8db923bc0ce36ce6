"""Arguments of the commands that send requests: infer, chat, run, demo."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shmserve.clients.cli.arguments.common import (
    add_backend_settings,
    add_command,
    add_json,
    add_model,
    add_server_command,
    add_version,
    at_least_0,
    at_least_1,
    seconds,
)
from shmserve.clients.cli.help import rare


def add_infer(commands: Any) -> None:
    examples = """  shmserve infer mlp --random
  shmserve infer mlp --random --batch 8 --repeat 1000
  shmserve infer add_sub --input INPUT0=1,2,3,4 --input INPUT1='[10, 20, 30, 40]'
  shmserve infer mlp --input x=@x.npy --out results
  shmserve infer classify --input image=@photo.jpg
  shmserve infer add_sub request.json --json
"""
    command = add_server_command(
        commands, "infer", "infer", "send a request to a model and print its outputs", examples
    )
    add_model(command)
    _add_inputs(command)
    command.add_argument(
        "--timeout", metavar="SECONDS", type=seconds, help="maximum time to wait for a response (default: no limit)"
    )
    command.add_argument(
        "--stream", action="store_true", help="print each response as it arrives; for decoupled models"
    )
    add_version(command)
    add_json(command)


def add_chat(commands: Any) -> None:
    examples = """  shmserve chat qwen
  shmserve chat qwen "What is a tensor?" --max-tokens 200
  git diff | shmserve chat qwen --system "Write a commit message for this change."
  shmserve chat qwen --url https://models.example.com --token-file token
"""
    about = "chat with a language model in the terminal"
    command = add_command(commands, "chat", "chat", about, examples)
    add_model(command)
    add = command.add_argument
    add("prompt", metavar="MESSAGE", nargs="*", help="print the answer to this message, and end")
    add("--system", metavar="TEXT", help="the system prompt")
    add("--max-tokens", metavar="N", type=at_least_1, help="maximum length of an answer")
    add("--temperature", metavar="T", type=float, help="0: always the most probable token (default: the model's)")
    rare(add, "--seed", metavar="N", type=at_least_0, help="seed, for reproducible answers")
    text = "HTTP endpoint of the server, or of any other that is OpenAI-compatible (default: http://localhost:8000)"
    add("--url", metavar="URL", default="http://localhost:8000", help=text)
    rare(add, "--token-file", metavar="FILE", type=Path, help="a file with the token to send")
    command.set_defaults(runtime_dir=None, context=None, server_key=None, key_file=None)  # --url is always set


def _add_inputs(command: argparse.ArgumentParser) -> None:
    """Arguments for inputs, repetition and outputs."""
    add = command.add_argument
    add("file", metavar="FILE", nargs="?", help='JSON file: {"inputs": {"NAME": [[1, 2, 3]]}}; - reads standard input')
    add(
        "-i",
        "--input",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="an input, with its numbers separated by commas, as JSON, or in @FILE (.npy, .json, image, .bin); for "
        "BYTES, @FILE is the value itself, and @- is standard input; repeatable",
    )
    add("--random", action="store_true", help="random data for the other inputs; dims of variable size are 1")
    add("--batch", metavar="N", type=at_least_1, help="with --random: batch size")
    rare(
        add,
        "--shape",
        metavar="NAME=D1,D2,...",
        action="append",
        default=[],
        help="with --random: full shape of an input",
    )
    rare(add, "--seed", metavar="N", type=at_least_0, help="with --random: seed, for reproducible data")
    rare(add, "--outputs", metavar="NAME,...", help="outputs to compute (default: all)")
    add("--out", metavar="DIR", type=Path, help="write each output to DIR/NAME.npy")
    add(
        "--repeat",
        metavar="N",
        type=at_least_1,
        default=1,
        help="send the request N times in a row, and print the median and 99th percentile of the latency",
    )


def add_dev(commands: Any) -> None:
    examples = """  shmserve dev app.py
  shmserve dev app.py --http-port 9000
"""
    note = """
The models of a Python file, its modules beside it included, are loaded again when they are saved; while the new code
cannot be loaded, the old code keeps serving. Errors are printed here and shown on the web page. OPTION is any option of
`shmserve serve`.
"""
    about = "serve a file while you edit it; saving it loads it again"
    command = add_command(commands, "dev", "run", about, examples, ("stopped", "cannot start"), note)
    command.add_argument("file", metavar="FILE", help="a file with models: app.py, model.onnx, ...")
    command.add_argument("options", metavar="OPTION", nargs=argparse.REMAINDER, help="an option of `shmserve serve`")


def add_run(commands: Any) -> None:
    examples = """  shmserve run models/mlp --random
  shmserve run models/mlp --input x=@x.npy --repeat 100
  shmserve run models/add_sub --random --pdb      stop in the debugger where the model raises
"""
    about = "run one model in this terminal without a server; breakpoint() works"
    codes = ("success", "the model could not be loaded, or failed")
    command = add_command(commands, "run", "run", about, examples, codes)
    add = command.add_argument
    add("model_dir", metavar="MODEL_DIR", type=Path, help="directory with the model's config.pbtxt")
    _add_inputs(command)
    add("--pdb", action="store_true", help="stop in Python's debugger where the model raises")
    add_backend_settings(add)
    text = "use MODEL_DIR/configs/NAME.pbtxt if it exists"
    rare(add, "--model-config-name", metavar="NAME", default="", help=text)
    add("--version", metavar="N", type=at_least_1, help="model version (default: highest)")
    add_json(command)


def add_demo(commands: Any) -> None:
    about = "run the sample models on real examples and print the results"
    command = add_server_command(commands, "demo", "demo", about, "  shmserve demo\n")
    add_json(command)
