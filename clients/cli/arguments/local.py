"""Arguments of check, doctor, init, pull, build, gateway, keygen and completion."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shmserve.clients.cli.arguments.common import (
    add_backend_directory,
    add_command,
    add_json,
    add_output,
    add_server_command,
    at_least_1,
    seconds,
    size,
)
from shmserve.clients.cli.commands import completion
from shmserve.clients.cli.help import make_rare, rare
from shmserve.gateway import options

TARGET_GPUS, MAX_GPUS = 8, 1024
SHOWN = frozenset(
    ("http_port", "grpc_port", "metrics_port", "http_address", "http_roles", "tokens_file", "tls_cert", "zmq_address")
)
"""Options of `gateway` that its short help lists."""


def add_check(commands: Any) -> None:
    examples = """  shmserve check ./models
  shmserve check ./models --load --timeout 60
  shmserve check ./models ./more --json
  shmserve check ./models --target gpu        here, for a machine with GPUs
"""
    about = "check model repositories for errors before they are served"
    codes = ("no errors", "errors found (with --strict: errors or warnings)")
    command = add_command(commands, "check", "check", about, examples, codes)
    add = command.add_argument
    add("roots", metavar="ROOT", nargs="+", help="model repository: a directory with one subdirectory per model")
    add("--load", action="store_true", help="also load each model, in a temporary server")
    add("--strict", action="store_true", help="treat warnings as errors")
    add("--quiet", action="store_true", help="print only errors")
    add("--model-config-name", metavar="NAME", default="", help="use configs/NAME.pbtxt for each model that has it")
    add("--timeout", metavar="SECONDS", type=seconds, help="with --load: maximum loading time (default: no limit)")
    add(
        "--target", metavar="cpu|gpu[:N]", type=_target, help="check for a machine without GPUs, or with N (default: 8)"
    )
    add_backend_directory(add)
    text = "a --host-policy of the server: warn of models that name another one; repeatable"
    rare(add, "--host-policy", metavar="NAME[,...]", action="append", help=text)
    text = "the server has this flag: repositories may have models of the same name"
    rare(add, "--model-namespacing", action="store_true", help=text)
    add_output(command, watch=True)


def _target(text: str) -> tuple[int, ...]:
    """The numbers of the GPUs of the machine on which the models are to run."""
    kind, colon, count = text.partition(":")
    if text == "cpu":
        return ()
    if kind != "gpu" or (colon and not (count.isascii() and count.isdecimal() and 0 < int(count) <= MAX_GPUS)):
        raise argparse.ArgumentTypeError(f"'{text}' is not cpu, gpu or gpu:N with N from 1 to {MAX_GPUS}")
    return tuple(range(int(count or TARGET_GPUS)))


def add_doctor(commands: Any) -> None:
    examples = """  shmserve doctor
  shmserve doctor --runtime-dir /run/shmserve
  shmserve doctor --json
"""
    about = "check whether this machine can run a server, and show how to fix problems"
    codes = ("a server can run here", "a problem prevents a server from starting")
    command = add_command(commands, "doctor", "doctor", about, examples, codes)
    text = "the directory in which a server runs, or is to run (default: that of this user)"
    command.add_argument("--runtime-dir", metavar="DIR", type=Path, help=text)
    add_json(command)


def add_init(commands: Any) -> None:
    examples = """  shmserve init net --from model.onnx
  shmserve init scale --from python           a model.py to write your own code into
  shmserve init iris --from classifier.joblib
  shmserve init net --from torch --repository ./more
"""
    note = """
--from takes an ONNX file, a TorchScript or torch.export file (.pt, .pt2), a scikit-learn model (.joblib, .pkl), an
XGBoost model (.json, .ubj), a language model (.gguf), or python, sklearn or torch for a model.py with an example. A
file is copied. Nothing is overwritten.
"""
    about = "create a model directory with a commented configuration"
    codes = ("written", "not written")
    command = add_command(commands, "init", "init", about, examples, codes, note)
    add = command.add_argument
    add("name", metavar="NAME", help="name of the model, and of its directory")
    add(
        "--from",
        dest="source",
        metavar="FILE",
        required=True,
        help="a model file (.onnx, .pt, .pt2, .joblib, .pkl, .json, .ubj, .gguf), or python, sklearn or torch",
    )
    text = "model repository, created if it does not exist (default: ./models)"
    add("--repository", metavar="DIR", type=Path, default=Path("models"), help=text)
    add_json(command)


def add_pull(commands: Any) -> None:
    examples = """  shmserve pull hf://OWNER/REPOSITORY/chat-Q4_K_M.gguf
  shmserve pull hf://OWNER/REPOSITORY --name chat --max-size 8GiB
  shmserve pull s3://BUCKET/models/resnet --repository /srv/models
"""
    note = """
URL is a model's directory as in a model repository, or one file: a GGUF, ONNX or other model file. Of a Hugging Face
repository, its only GGUF file is taken, or the network with its tokenizer, for vLLM. An interrupted download is resumed
by the same command. Credentials are read from the same places as by `serve`.
"""
    about = "download a model into a model repository"
    codes = ("downloaded", "not downloaded")
    command = add_command(commands, "pull", "pull", about, examples, codes, note)
    add = command.add_argument
    add("url", metavar="URL", help="address of the model: s3://, gs://, as://, http(s):// or hf://")
    add("--name", metavar="NAME", default="", help="name of the model (default: that of the file or directory)")
    text = "download nothing if the model is larger, e.g. 8GiB (default: no limit)"
    add("--max-size", metavar="SIZE", type=size, default=0, help=text)
    text = "model repository, created if it does not exist (default: ./models)"
    add("--repository", metavar="DIR", type=Path, default=Path("models"), help=text)


def add_build(commands: Any) -> None:
    examples = """  shmserve build models/resnet -o models/resnet_trt/1/model.plan
  shmserve build model.onnx -o model.plan --max-batch 32
  shmserve build model.onnx -o model.plan --profile x=1x3x224x224:8x3x224x224:32x3x224x224
"""
    note = """
A plan works only with this GPU type and this TensorRT version, unless --hardware or --version-compatible is given. For
a model directory, batch size and dims come from its config.pbtxt.
"""
    about = "compile an ONNX model to a TensorRT plan for this machine's GPU"
    command = add_command(commands, "build", "run", about, examples, note=note)
    add = command.add_argument
    add("model", metavar="MODEL", type=Path, help="ONNX file, or model directory with one")
    add("-o", "--out", metavar="FILE", type=Path, required=True, help="output file; an existing file is replaced")
    add(
        "--profile",
        metavar="NAME=MIN:BEST:MAX",
        nargs="+",
        action="append",
        default=[],
        help="shapes of each input with dynamic dims, such as 1x3x224x224; repeat to add a profile",
    )
    add("--max-batch", metavar="N", type=at_least_1, help="build for batches of 1 to N rows")
    text = "model version, for a model directory (default: highest)"
    rare(add, "--version", metavar="N", type=at_least_1, help=text)
    add(
        "--precision",
        choices=("fp16", "bf16"),
        help="with TensorRT 10: also compute in this type (default: only in the types of the ONNX file)",
    )
    text = "maximum device memory for the workspace of a layer"
    rare(add, "--workspace-mb", metavar="MIB", type=at_least_1, help=text)
    text = "0 builds fastest, 5 searches longest (default: 3)"
    add("--level", type=int, choices=range(6), help=text)
    rare(add, "--timing-cache", metavar="FILE", help="timings from earlier builds (default: in ~/.cache/shmserve)")
    rare(add, "--no-timing-cache", action="store_true", help="measure everything again")
    rare(
        add, "--version-compatible", action="store_true", help="build a plan that later TensorRT versions can also run"
    )
    rare(
        add,
        "--hardware",
        choices=("ampere+", "same"),
        help="build a plan for all GPUs since Ampere, or for all of the same compute capability",
    )
    rare(add, "--plugins", metavar="LIST", help="plug-in libraries, separated by ';'")
    add_json(command)


def add_gateway(commands: Any) -> None:
    examples = """  shmserve gateway
  shmserve gateway --http-port 9000 --allow-metrics=false
  shmserve gateway --http-roles infer,observe,operate
"""
    about = "run a gateway: serve HTTP and gRPC (KServe v2) and Prometheus metrics for a running server"
    codes = ("stopped by SIGTERM or Ctrl-C", "could not start or listen")
    command = add_server_command(commands, "gateway", "run", about, examples, codes, keys=False)
    options.add(command)
    for action in command._actions:
        if action.dest not in SHOWN:
            make_rare(action)


def add_keygen(commands: Any) -> None:
    examples = """  shmserve keygen                              NAME defaults to the host name
  shmserve keygen alice --out ~/.config/shmserve
  shmserve keygen robot --roles infer,observe,operate
"""
    about = "create a key pair for ZeroMQ over tcp, for a gateway or a client"
    command = add_command(commands, "keygen", "keygen", about, examples, ("done", "not written"))
    command.add_argument("name", metavar="NAME", nargs="?", help="name of the key pair (default: the host name)")
    command.add_argument("--out", metavar="DIR", type=Path, default=Path(), help="directory for NAME.key and NAME.pub")
    command.add_argument(
        "--roles",
        metavar="ROLE,ROLE",
        default="infer,observe",
        help="roles to write into NAME.pub: infer, observe, operate (default: %(default)s)",
    )
    add_json(command)


def add_completion(commands: Any) -> None:
    note = """
In ~/.bashrc or ~/.zshrc:       eval "$(shmserve completion bash)"      (or zsh)
In ~/.config/fish/config.fish:  shmserve completion fish | source
"""
    about = "print a shell script for Tab completion of commands, options and models"
    examples = '  shmserve completion bash\n  eval "$(shmserve completion bash)"      in ~/.bashrc\n'
    command = add_command(commands, "completion", "completion", about, examples, note=note)
    command.add_argument("shell", choices=completion.SHELLS)
