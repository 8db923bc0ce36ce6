"""The server's settings: command line, then SHMSERVE_* in the environment. Names are Triton's where it has one."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from shmserve.paths import server_runtime_dir

_EPILOG = """
every option can also be given as an environment variable, in capitals and with SHMSERVE_ before it
(SHMSERVE_MODEL_REPOSITORY=DIR1:DIR2); the command line is stronger

example:
  shmserve serve --model-repository ./models
  shmserve infer mlp --random
"""


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="shmserve serve",
        description="Serves the models of one or more repositories to clients on this machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("--model-repository", "--model-store", action="append", metavar="DIR", type=Path,
        help="directory with one sub-directory a model; may be given several times")  # fmt: skip
    add("--runtime-dir", metavar="DIR", type=Path,
        help="where the sockets are (default: $SHMSERVE_RUNTIME_DIR, /run/shmserve if writable, "
        "$XDG_RUNTIME_DIR/shmserve, or a directory in the temporary one)")  # fmt: skip
    add("--strict-readiness", metavar="BOOL", type=_boolean, default=True,
        help="ready only when every model is READY (default: true); false: when loading has ended")  # fmt: skip
    add("--exit-on-error", metavar="BOOL", type=_boolean, default=False,
        help="end if a model fails to load at start (default: false, so that the others are served)")  # fmt: skip
    add("--exit-timeout-secs", metavar="S", type=_seconds, default=30.0,
        help="at a stop, wait this long for requests in flight (default: 30)")  # fmt: skip
    add("--disable-auto-complete-config", action="store_true", default=False,
        help="take configurations as they are; an incomplete one fails to load")  # fmt: skip
    add("--backend-config", action="append", metavar="BACKEND,KEY=VALUE", default=[],
        help="a setting for a backend, e.g. onnxruntime,default-max-batch-size=8")  # fmt: skip
    add("--host-policy", action="append", metavar="NAME,cpu-cores=LIST", default=[], type=_host_policy,
        help="CPU cores for the instances of a host policy, e.g. cpu,cpu-cores=0-3,8; those that name no policy have "
        "'cpu' (default: all cores of the server)")  # fmt: skip
    add("--broker-arena-bytes", metavar="N", type=int, default=256 << 20,
        help="memory for tensors that come in frames (default: 256 MiB)")  # fmt: skip
    add("--log-verbose", metavar="N", type=int, default=0,
        help="1: more in the log; 2: also each batch, and why it was formed (default: 0)")  # fmt: skip
    add("--ready-fd", type=int, default=-1, help=argparse.SUPPRESS)
    add("--hints", action="store_true", help="when ready, show what to try next")
    return found


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The settings. Wrong use ends the process with code 2 and a usage line."""
    found = parser()
    known = {action.dest: action for action in found._actions if action.option_strings}
    found.set_defaults(**_from_environment(found, known))
    settings = found.parse_args(argv)
    if not settings.model_repository:
        found.error("no --model-repository given: name the directory that holds the models")
    for root in settings.model_repository:
        if not root.is_dir():
            found.error(f"--model-repository {root} is not a directory")
    if settings.runtime_dir is None:
        settings.runtime_dir = server_runtime_dir()
    return settings


def backend_settings(settings: argparse.Namespace) -> dict[str, str]:
    """For the workers: 'backend,key' -> value."""
    found = {}
    for text in settings.backend_config:
        name, _, value = text.partition("=")
        found[name] = value
    if settings.disable_auto_complete_config:
        found["disable-auto-complete-config"] = "true"
    return found


def host_policies(settings: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    return dict(settings.host_policy)


def _host_policy(text: str) -> tuple[str, tuple[int, ...]]:
    """`cpu,cpu-cores=0-3,8` -> ("cpu", (0, 1, 2, 3, 8)). Cores that this machine does not let us use are refused."""
    name, _, value = text.partition(",")
    key, _, cores = value.partition("=")
    if not name or key != "cpu-cores":
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME,cpu-cores=LIST with a LIST like 0-3,8")
    found: set[int] = set()
    for part in cores.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise argparse.ArgumentTypeError(f"'{part}' is neither a core nor a range of cores")
        found.update(range(int(first), int(last or first) + 1))
    ours = os.sched_getaffinity(0)
    if not found or not found <= ours:
        wrong = ", ".join(map(str, sorted(found - ours))) or "none given"
        raise argparse.ArgumentTypeError(f"cores that cannot be used here: {wrong}; there are {sorted(ours)}")
    return name, tuple(sorted(found))


def _from_environment(found: argparse.ArgumentParser, known: dict[str, argparse.Action]) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, action in known.items():
        text = os.environ.get("SHMSERVE_" + name.upper())
        if not text or name in ("help", "ready_fd", "hints"):
            continue
        try:
            if name == "model_repository":
                values[name] = [Path(part) for part in text.split(":") if part]
            elif name == "backend_config":
                values[name] = text.split(";")
            elif name == "host_policy":
                values[name] = [_host_policy(part) for part in text.split(";")]
            elif action.nargs == 0:
                values[name] = _boolean(text)
            else:
                values[name] = action.type(text) if callable(action.type) else text
        except (ValueError, argparse.ArgumentTypeError) as error:
            found.error(f"SHMSERVE_{name.upper()}={text}: {error}")
    return values


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "1", "yes", "on"):
        return True
    if text.lower() in ("false", "0", "no", "off"):
        return False
    raise argparse.ArgumentTypeError(f"'{text}' is neither true nor false")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds")
    return value
