"""Arguments of the commands that change what is served: load, unload, restart, traffic, drain; and of context."""

from __future__ import annotations

import argparse
from typing import Any

from shmserve.clients.cli.arguments.common import (
    add_color,
    add_command,
    add_json,
    add_model,
    add_server_command,
    at_least_1,
    seconds,
)
from shmserve.clients.cli.commands import completion
from shmserve.clients.cli.help import CommandParser


def add_load(commands: Any) -> None:
    examples = """  shmserve load mlp
  shmserve load mlp cnn
  shmserve load mlp --version 2               this version and no other
  shmserve load mlp --previous                go back to what was served before the last load
  shmserve load mlp --config-json config.json
  shmserve load new --config-json config.json --file 1/model.onnx=./new.onnx
"""
    about = "load models, or reload what has changed, and wait until they are READY"
    codes = ("every model is READY", "a load failed; what was served before is still served")
    command = add_server_command(commands, "load", "operate", about, examples, codes)
    add_model(command, "*")
    add = command.add_argument
    add("--all", action="store_true", help="every model in the server's repositories")
    add("--config-json", metavar="FILE", help="JSON to use instead of config.pbtxt; - reads standard input")
    add(
        "--file",
        metavar="NAME=PATH",
        action="append",
        default=[],
        help="with --config-json: send a model file, e.g. 1/model.onnx=./model.onnx, instead of the repository's "
        "files; repeatable",
    )
    add(
        "--previous",
        action="store_true",
        help="restore what was served before the last load, without reading the repository; works in every "
        "--model-control-mode",
    )
    version = add(
        "--version",
        metavar="N",
        type=at_least_1,
        action="append",
        default=[],
        help="serve only this version; repeatable (default: by version_policy)",
    )
    completion.completes(version, completion.versions)
    _add_operation(command)
    add_color(command)


def add_unload(commands: Any) -> None:
    examples = "  shmserve unload mlp\n  shmserve unload mlp cnn --no-wait\n  shmserve unload mlp --force\n"
    about = "unload models: finish requests in flight, then stop their processes and free their memory"
    codes = ("unloaded (with --no-wait: started)", "failed")
    command = add_server_command(commands, "unload", "operate", about, examples, codes)
    add_model(command, "+")
    command.add_argument("--no-wait", action="store_false", dest="wait", help="do not wait for the processes")
    command.add_argument(
        "--force", action="store_true", help="fail requests in flight and kill the processes immediately"
    )
    command.add_argument(
        "--dependents", action="store_true", help="also unload the models that were loaded only for this ensemble"
    )
    _add_operation(command)


def add_restart(commands: Any) -> None:
    examples = """  shmserve restart mlp
  shmserve restart mlp --version 2
  shmserve restart mlp --instance mlp_0_1     a name from `shmserve models --instances`
"""
    about = "replace the processes of models without losing requests"
    command = add_server_command(commands, "restart", "operate", about, examples)
    add_model(command, "+")
    version = command.add_argument(
        "--version", metavar="N", type=at_least_1, help="restart only this version (default: all)"
    )
    completion.completes(version, completion.versions)
    instance = command.add_argument("--instance", metavar="NAME", help="restart only this instance")
    completion.completes(instance, completion.instances)
    _add_operation(command)


def add_traffic(commands: Any) -> None:
    examples = """  shmserve traffic mlp                     show how requests are divided
  shmserve traffic mlp 3=10                10 % to version 3, the rest to the highest other version
  shmserve traffic mlp --all 2             all to version 2: go back at once
  shmserve traffic mlp --reset             as without shares: all to the highest version
  shmserve traffic mlp --alias prod=2      mlp@prod is version 2
  shmserve traffic mlp --shadow 3=5        also send 5 % to version 3 and compare the responses
"""
    about = "divide the requests that name no version among the versions of a model, and name versions"
    command = add_server_command(commands, "traffic", "operate", about, examples)
    add_model(command)
    add = command.add_argument
    text = "share of the requests; replaces all earlier shares"
    add("share", metavar="VERSION=PERCENT", nargs="*", type=_share, help=text)
    completion.completes(
        add("--all", metavar="VERSION", type=at_least_1, help="the same as VERSION=100"), completion.versions
    )
    add("--reset", action="store_true", help="remove all shares")
    add("--alias", metavar="NAME=VERSION", type=_alias, action="append", default=[], help="set an alias; repeatable")
    add("--remove-alias", metavar="NAME", action="append", default=[], help="remove an alias; repeatable")
    shadow = command.add_mutually_exclusive_group()
    text = "also send PERCENT of the requests to VERSION and compare the responses"
    shadow.add_argument("--shadow", metavar="VERSION=PERCENT", type=_share, help=text)
    shadow.add_argument("--no-shadow", action="store_true", help="stop sending requests to a shadow")
    add_json(command, "print JSON")


def add_drain(commands: Any) -> None:
    examples = """  shmserve drain                      wait until the server is empty
  shmserve drain --timeout 300 --json
  shmserve drain --undrain            put it back into service
"""
    about = "take the server out of service, and wait until it has finished its requests"
    codes = (
        "the server is empty (with --no-wait and --undrain: done)",
        "failed, or not empty within --timeout, which leaves the server out of service",
    )
    command = add_server_command(commands, "drain", "drain", about, examples, codes)
    add = command.add_argument
    add("--undrain", action="store_true", help="put the server back into service")
    add("--no-wait", action="store_false", dest="wait", help="do not wait until the server is empty")
    add("--timeout", metavar="SECONDS", type=seconds, help="maximum time to wait (default: no limit)")
    text = "time without a request after which the server is empty (default: 5); a balancer needs seconds to notice"
    add("--quiet", metavar="SECONDS", type=seconds, help=text)
    add_json(command, "print a line of JSON per second, and one at the end")


def _share(text: str) -> tuple[int, int]:
    version, separator, percent = text.partition("=")
    try:
        pair = at_least_1(version), int(percent.removesuffix("%"))
    except (ValueError, argparse.ArgumentTypeError):
        pair = 0, -1
    if not separator or not 0 <= pair[1] <= 100:
        raise argparse.ArgumentTypeError(f"found '{text}', expected VERSION=PERCENT, such as 3=10")
    return pair


def _alias(text: str) -> tuple[str, int]:
    name, _, version = text.partition("=")
    try:
        return name, at_least_1(version)
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"found '{text}', expected NAME=VERSION, such as prod=2") from None


def _add_operation(command: argparse.ArgumentParser) -> None:
    text = "maximum time to wait (default: no limit); the server continues the operation"
    command.add_argument("--timeout", metavar="SECONDS", type=seconds, help=text)
    add_json(command, "print a JSON list with an object per model")


def add_context(commands: Any) -> None:
    examples = """  shmserve context add prod https://models.example.com --token-file ~/.shmserve-token
  shmserve context use prod
  shmserve context list
  shmserve models --context prod
"""
    about = "name servers, and choose the one that commands connect to"
    command = add_command(commands, "context", "context", about, examples)
    actions = command.add_subparsers(dest="do", metavar="ACTION", required=True, parser_class=CommandParser)
    add = actions.add_parser("add", help="add or replace a context; the first one becomes the current one")
    add.add_argument("name", metavar="NAME", help="the name of the context")
    add.add_argument("address", metavar="URL", help="the server, as in --url of other commands")
    add.add_argument("--token-file", metavar="FILE", help="with http:// and https://: a file with the token to send")
    add.add_argument("--server-key", metavar="KEY", help="with tcp://: the server's public key, or the file NAME.pub")
    add.add_argument("--key-file", metavar="FILE", help="with tcp://: your own NAME.key")
    for name, text in (("use", "make a context the current one"), ("remove", "remove a context")):
        actions.add_parser(name, help=text).add_argument("name", metavar="NAME", help="the name of the context")
    add_json(actions.add_parser("list", help="list the contexts"))
