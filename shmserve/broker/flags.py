"""The flags of `shmserve serve`, with Triton's names: one table for the command line, the environment, the file and
docs/settings.md.

The rule of the file: a flag is a row, and nothing about a flag stands anywhere else. What the values mean together is
in settings.py.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shmserve.broker import access, metric_settings, traces
from shmserve.broker.cores import host_policy
from shmserve.broker.doorflags import DOOR_FLAGS, DOORS
from shmserve.broker.flag import ENVIRONMENT, UNITS, Flag
from shmserve.broker.logs import FORMATS
from shmserve.broker.throttle import Rate
from shmserve.broker.triton_flags import TRITON, TRITON_FLAGS, decimal, fraction
from shmserve.core import limits
from shmserve.core.limiter import ANY, SHARED
from shmserve.repo.generation import FILE_BYTES, TOTAL_BYTES

REQUIRED = "required"
SECONDS = 1e6
"""The longest time that a flag takes."""
_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")


MODELS, LOADING, INSTANCES, MEMORY = "Models", "Loading", "Instances and cores", "Memory"
ACCESS, STOPPING, LOGGING, SERVICE = "Access and limits", "Stopping", "Logging", "Service"
GROUPS = (MODELS, LOADING, INSTANCES, MEMORY, ACCESS, DOORS, STOPPING, LOGGING, SERVICE, TRITON)


def _old_trace(name: str, setting: str, metavar: str) -> Flag:
    return Flag(f"trace-{name}", "trace", LOGGING, f"the old name of --trace-config {setting}=", [], metavar,
                repeatable=True, instead="trace-config", setting=setting)  # fmt: skip


FLAGS = (
    Flag("model-repository", "path", MODELS, "directory with one sub-directory a model; may be given several times",
         [], "DIR", repeatable=True, alias="model-store", shown=REQUIRED),
    Flag("model-control-mode", "choice", MODELS, "none: load all models at start, and leave it at that; poll: follow "
         "changes in the repositories; explicit: load what --load-model and clients ask for",
         "none", "MODE", choices=("none", "poll", "explicit")),
    Flag("load-model", "text", MODELS, "in mode explicit, a model to load at start; may be given several times; * alone"
         " is all of them", [], "MODEL", repeatable=True),
    Flag("repository-poll-secs", "seconds", MODELS, "in mode poll, how often to look for changes; 0: never", 15.0, "S"),
    Flag("settle-secs", "seconds", MODELS, "in mode poll, how long a model must not change before it is loaded, so that"
         " no half-copied one is", 1.0, "S"),
    Flag("model-config-name", "text", MODELS, "use configs/NAME.pbtxt of each model that has it, instead of its "
         "config.pbtxt", "", "NAME"),
    Flag("model-namespacing", "boolean", MODELS, "only false: names of models are unique over all repositories", False),
    Flag("disable-auto-complete-config", "boolean", LOADING, "take configurations as they are; an incomplete one fails "
         "to load", False),
    Flag("strict-model-config", "boolean", LOADING, "the old name of --disable-auto-complete-config",
         instead="disable-auto-complete-config"),
    Flag("backend-config", "setting", LOADING, "a setting for a backend, or for all of them without BACKEND; e.g. "
         "onnxruntime,default-max-batch-size=8; may be given several times", [], "BACKEND,KEY=VALUE", repeatable=True),
    Flag("backend-directory", "path", LOADING, "where backends of your own are: NAME/backend.py for each", None, "DIR",
         shown="there are none"),
    Flag("model-load-thread-count", "whole", LOADING, "how many models load at the same time", 4, "N", least=1),
    Flag("model-load-retry-count", "whole", LOADING, "how often loading a model is tried again after a failure",
         0, "N"),
    Flag("model-environment", "text", LOADING, "models get this environment variable of the server too; HF_*: all that "
         "begin so; *: all but the server's own; may be given several times", [], "NAME", repeatable=True,
         shown="none", compatible=["*"], triton="all; they may hold secrets"),
    Flag("strict-readiness", "boolean", LOADING, "ready only when every model is READY; false: when loading has ended",
         True),
    Flag("exit-on-error", "boolean", LOADING, "end if a model fails to load at start; false: the others are served",
         False, triton="true; one bad model does not keep the others from being served, and readiness says so",
         compatible=True),
    Flag("execution-limit-secs", "seconds", INSTANCES, "a worker that runs one batch for longer hangs, and is killed; "
         "a model's parameter execution_limit_secs is stronger; 0: no limit", 300.0, "S"),
    Flag("crash-limit", "whole", INSTANCES, "crashes of an instance in a row, with no batch done in between, after "
         "which it counts as broken; if other instances answer meanwhile it is quarantined; a model's parameter "
         "crash_limit is stronger; 0: never", 3, "N"),
    Flag("load-limit-secs", "seconds", LOADING, "a worker that loads for longer is killed, and has failed to load; 0: "
         "no limit", 1800.0, "S"),
    Flag("prepared-process", "boolean", INSTANCES, "workers are made of a process that has imported what all need; "
         "false: each is a fresh interpreter, which takes longer and more memory", True),
    Flag("host-policy", "policy", INSTANCES, "CPU cores for the instances of a host policy: NAME,cpu-cores=0-3,8, or "
         "NAME,numa-node=N for all of a node; instances that name no policy have 'cpu' or 'gpu_DEVICE'; may be given "
         "several times", [], "NAME,KEY=VALUE", repeatable=True),
    Flag("rate-limit", "choice", INSTANCES, "execution_count: an instance runs a batch only while it has the resources "
         "of its rate_limiter; off: as soon as it is idle", "off", choices=("off", "execution_count")),
    Flag("rate-limit-resource", "resource", INSTANCES, "how much there is of a resource of each device, of one, or "
         "(:global) of all together; not given: as much as one instance asks for at most; may be given several times",
         [], "NAME:COUNT[:DEVICE]", repeatable=True),
    Flag("cache-config", "cache", MEMORY, "local,size=BYTES: answers of models with response_cache are kept", 0,
         "local,size=BYTES", shown="none are kept"),
    Flag("response-cache-byte-size", "bytes", MEMORY, "the older way to say --cache-config local,size=BYTES", 0, "N"),
    Flag("broker-arena-bytes", "bytes", MEMORY, "memory for tensors that come in frames", 256 << 20, "N",
         least=1 << 20),
    Flag("pinned-memory-pool-byte-size", "bytes", MEMORY,
         "host memory of callers that one instance on a GPU may pin for it; 0: none", 256 << 20, "N"),
    Flag("cuda-memory-pool-byte-size", "pool", MEMORY, "memory on its GPU that one instance may have for tensors that "
         "stay there; of all GPUs, or of one; 0: none do; may be given several times", [], "[GPU:]N", repeatable=True,
         shown="1 GiB", triton="64 MiB, of the server on each GPU; here each instance has its own"),
    Flag("worker-output-bytes", "bytes", MEMORY, "memory that one instance may have for its outputs", 4 << 30, "N",
         least=1 << 20),
    Flag("instance-memory-limit", "bytes", MEMORY, "an instance whose process has more memory of its own is ended; a "
         "model's parameter memory_limit_mb is stronger; 0: no limit", 0, "N", shown="no limit"),
    Flag("instance-gpu-memory-limit", "bytes", MEMORY, "an instance whose process has more memory on its GPU is ended; "
         "a model's parameter gpu_memory_limit_mb is stronger; 0: no limit", 0, "N", shown="no limit"),
    Flag("override-bytes", "bytes", MEMORY, "the most bytes of files that one load call may bring", 1 << 30, "N"),
    Flag("generation-bytes", "bytes", MEMORY, "copy at most so many bytes of a version's small files to the runtime "
         "directory when it is loaded; a restarted instance loads these; the other files are linked", TOTAL_BYTES, "N"),
    Flag("generation-file-bytes", "bytes", MEMORY, "the largest file that --generation-bytes copies", FILE_BYTES, "N"),
    Flag("socket-group", "group", ACCESS, "members of this group may connect to the lane, infer and observe", None,
         "NAME", shown="nobody but the server's own user"),
    Flag("access", "access", ACCESS, "gives roles, of infer, observe and operate, to uid:N, gid:N, user:NAME, "
         "group:NAME, or * for all who can connect; may be given several times", [], "WHO=ROLE,ROLE",
         repeatable=True),
    Flag("limit", "limit", ACCESS, "a limit of docs/security.md, e.g. client_requests=1000; may be given several "
         "times", [], "NAME=VALUE", repeatable=True),
    *DOOR_FLAGS,
    Flag("exit-timeout-secs", "seconds", STOPPING, "at a stop, requests in flight have this long; then all is killed",
         30.0, "S"),
    Flag("log-verbose", "whole", LOGGING, "1: more in the log; 2: also each batch, and why it was formed", 0, "N"),
    Flag("allow-gpu-metrics", "boolean", LOGGING, "metrics tell what GPUs do, if there are any", True),
    Flag("allow-cpu-metrics", "boolean", LOGGING, "metrics of the machine's cores and memory", True),
    Flag("metrics-interval-ms", "whole", LOGGING, "how often GPUs and cores are looked at; 0: every two seconds, and "
         "the page of metrics is built for each request, however many there are", 2000, "N"),
    Flag("metrics-config", "metrics", LOGGING, "which latencies metrics have: counter_latencies=BOOL (true), "
         "histogram_latencies=BOOL and summary_latencies=BOOL (false), "
         "summary_quantiles=QUANTILE:ERROR,... (0.5:0.05,0.9:0.01,0.95:0.001,0.99:0.001,0.999:0.001); may be given "
         "several times", [], "NAME=VALUE", repeatable=True),
    Flag("log-info", "boolean", LOGGING, "log what goes on", True),
    Flag("log-warning", "boolean", LOGGING, "log what may be wrong", True),
    Flag("log-error", "boolean", LOGGING, "log what has failed", True),
    Flag("log-format", "choice", LOGGING, "default: local time, level, text; ISO8601: the same with the time in UTC; "
         "json: an object a line, for programs",
         "default", "FORM", choices=FORMATS),
    Flag("log-file", "path", LOGGING, "append to this file, not to the console; it may be rotated by renaming it",
         None, "FILE", shown="console"),
    Flag("log-worker-lines", "whole", LOGGING, "log at most so many lines a second of what one worker or gateway "
         "prints; what is dropped is counted; 0: no limit", Rate().lines, "N"),
    Flag("log-worker-bytes", "bytes", LOGGING, "log at most so many bytes a second of what one worker or gateway "
         "prints; 0: no limit", Rate().bytes, "N"),
    Flag("trace-config", "trace", LOGGING, "which requests are traced, and where to: triton,file=FILE, "
         "triton,log-frequency=N, level=TIMESTAMPS or TENSORS, rate=N (each N-th), count=N (so many at most); "
         "may be given several times", [], "KEY=VALUE", repeatable=True),
    _old_trace("file", "triton,file", "FILE"),
    _old_trace("level", "level", "LEVEL"),
    _old_trace("rate", "rate", "N"),
    _old_trace("count", "count", "N"),
    _old_trace("log-frequency", "triton,log-frequency", "N"),
    Flag("id", "text", SERVICE, "the server's name, as its metadata says it", "shmserve", "NAME",
         triton="triton; programs that look at the name see which server they talk to", compatible="triton"),
    Flag("triton-compatible", "boolean", SERVICE, "take Triton's defaults where they differ; a flag that is given "
         "counts all the same", False),
    Flag("runtime-dir", "path", SERVICE, "where the sockets are", None, "DIR",
         shown="/run/shmserve if writable, $XDG_RUNTIME_DIR/shmserve, or a directory in the temporary one"),
    Flag("config", "path", SERVICE, "a TOML file with flags as keys; the command line and the environment are stronger",
         None, "FILE"),
    Flag("environment-dir", "path", SERVICE, "where archives of EXECUTION_ENV_PATH are unpacked to, each once", None,
         "DIR", shown="environments in $CACHE_DIRECTORY, else in shmserve in the user's directory for caches"),
    *TRITON_FLAGS,
    Flag("hints", "boolean", SERVICE, "when ready, show what to try next", False, private=True),
    Flag("ready-fd", "whole", SERVICE, "a descriptor that READY is written to", -1, "FD", private=True),
)  # fmt: skip
BY_NAME = {name: flag for flag in FLAGS for name in (flag.name, flag.alias) if name}


def unknown(name: str, shown: str, prefix: str = "--") -> str:
    """What to say of a name that is not a flag. `shown` is how it was written, `prefix` how the nearest one is."""
    close = nearest(name.replace("_", "-").lower())
    return f"{shown} is unknown" + (f"; did you mean {prefix}{written(close, prefix)}?" if close else "")


def nearest(name: str, cutoff: float = 0.6) -> str:
    names = [known for known, flag in BY_NAME.items() if not flag.private]
    return next(iter(get_close_matches(name, names, 1, cutoff)), "")


def written(name: str, prefix: str) -> str:
    """A flag's name as it is written behind that prefix."""
    return name.replace("-", "_").upper() if prefix == ENVIRONMENT else name


# ------------------------------------------------------------------------------------------------- values


def from_text(flag: Flag, text: str) -> Any:
    """One value, as it stands on the command line or in a variable. Raises ValueError."""
    match flag.kind:
        case "boolean":
            return _boolean(text)
        case "whole" | "bytes":
            return _whole(flag, text)
        case "seconds":
            return _seconds(text)
        case "choice":
            return _choice(flag, text)
        case "setting":
            return _setting(text)
        case "policy":
            return host_policy(text)
        case "access":
            return access.rule(text)
        case "group":
            return access.group_id(text)
        case "limit":
            return _limit(text)
        case "cache":
            return _cache(text)
        case "resource":
            return _resource(text)
        case "trace":
            return traces.config(f"{flag.setting}={text}" if flag.setting else text)
        case "pool":
            return _pool(text)
        case "metrics":
            return metric_settings.config(text)
        case "fraction":
            return fraction(text)
        case "decimal":
            return decimal(text)
    if not text and flag.default != "":
        raise ValueError(f"a {flag.metavar or 'value'} is expected, and nothing was given")
    return Path(text) if flag.kind == "path" else text


def from_environment(flag: Flag, text: str) -> Any:
    """Directories are separated by ':', other values of a flag that may be given several times by ';'."""
    if not flag.repeatable:
        return from_text(flag, text)
    return [from_text(flag, part) for part in text.split(":" if flag.kind == "path" else ";") if part]


def from_toml(flag: Flag, value: Any, folder: Path) -> Any:
    """A value of the file in `folder`, where relative paths begin. Raises ValueError."""
    if flag.repeatable:
        values = value if isinstance(value, list) else [value]
        return [_one_from_toml(flag, one, folder) for one in values]
    return _one_from_toml(flag, value, folder)


def _one_from_toml(flag: Flag, value: Any, folder: Path) -> Any:
    types: tuple[tuple[type, ...], str]
    match flag.kind:
        case "boolean":
            types = (bool,), "true or false"
        case "whole":
            types = (int,), "a whole number"
        case "bytes":
            types = (int, str), 'a whole number or text like "256 MiB"'
        case "seconds":
            types = (int, float), "a number"
        case _:
            types = (str,), "text" + (" or an array of it" if flag.repeatable else "")
    if not isinstance(value, types[0]) or (isinstance(value, bool) and flag.kind != "boolean"):
        raise ValueError(f"found {_toml_type(value)}, expected {types[1]}")
    found = from_text(flag, str(value))
    return folder / found if isinstance(found, Path) else found


def _toml_type(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f'the text "{value}"'
    if isinstance(value, list):
        return "an array"
    return "a table" if isinstance(value, dict) else "a date or time"


def _cache(text: str) -> int:
    """Bytes of the response cache."""
    name, _, setting = text.partition(",")
    key, _, value = setting.partition("=")
    if name != "local":
        raise ValueError(f"cache '{name}' is not known; the one that there is: local,size=BYTES")
    if key != "size":
        raise ValueError(f"'{setting}' is no setting of the cache; expected size=BYTES")
    return _number(value, True, 1)


def _pool(text: str) -> tuple[int, int]:
    """A GPU, -1 for all of them, and how many bytes."""
    gpu, _, size = text.rpartition(":")
    if gpu and not (gpu.isascii() and gpu.isdecimal()):
        raise ValueError(f"found '{text}', expected N or GPU:N, as in 0:67108864")
    return int(gpu) if gpu else -1, _number(size, True, 0)


def _resource(text: str) -> tuple[str, int, int]:
    """A resource of the rate limiter: name, device, count."""
    name, _, rest = text.partition(":")
    count, _, device = rest.partition(":")
    if not name or not count.isdecimal() or not (device in ("", "global") or device.isdecimal()):
        raise ValueError(f"found '{text}', expected NAME:COUNT, NAME:COUNT:DEVICE or NAME:COUNT:global")
    return name, {"": ANY, "global": SHARED}[device] if not device.isdecimal() else int(device), int(count)


def _boolean(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(f"'{text}' is neither true nor false")


def _whole(flag: Flag, text: str) -> int:
    return _number(text, flag.kind == "bytes", None if flag.private else flag.least)


def _number(text: str, is_bytes: bool, least: int | None) -> int:
    match = re.fullmatch(r"(-?[0-9]{1,18})\s*([a-zA-Z]*)", text.strip())
    unit = UNITS.get(match[2].upper()) if match and (is_bytes or not match[2]) else None
    if match is None or unit is None:
        more = ", with KiB, MiB or GiB behind it if you like" if is_bytes else ""
        raise ValueError(f"'{text}' is not a whole number{more}")
    value = int(match[1]) * unit
    if least is not None and value < least:
        raise ValueError(f"{text} is too small; the least is {least}")
    return value


def _limit(text: str) -> tuple[str, int]:
    """NAME=VALUE. Names may be written with dashes too."""
    given, equals, value = text.partition("=")
    name = given.strip().replace("-", "_")
    rows = {row.name: row for row in limits.NAMED}
    if not equals:
        raise ValueError(f"'{text}' is not NAME=VALUE")
    if name not in rows:
        close = get_close_matches(name, rows, 1)
        raise ValueError(f"'{given}' is no limit" + (f"; did you mean {close[0]}?" if close else ""))
    return name, _number(value, name.endswith("_bytes"), rows[name].least)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < SECONDS:
        raise ValueError(f"'{text}' is not a number of seconds, from 0 to {SECONDS:g}")
    return value


def _choice(flag: Flag, text: str) -> str:
    """In upper or lower case, as in Triton."""
    for choice in flag.choices:
        if text.lower() == choice.lower():
            return choice
    close = get_close_matches(text.lower(), [choice.lower() for choice in flag.choices], 1)
    meant = next((choice for choice in flag.choices if close and choice.lower() == close[0]), "")
    more = f"; did you mean {meant}?" if meant else ""
    raise ValueError(f"'{text}' is none of {', '.join(flag.choices)}{more}")


def _setting(text: str) -> tuple[str, str]:
    """`onnxruntime,key=value` -> ("onnxruntime,key", "value"); `key=value` is for all backends: (",key", "value")."""
    name, given, value = text.partition("=")
    backend, comma, key = name.rpartition(",")
    if not given or not key or (comma and not backend) or "," in backend:
        raise ValueError(f"'{text}' is neither BACKEND,KEY=VALUE nor KEY=VALUE")
    return f"{backend},{key}", value


# ------------------------------------------------------------------------------------------------- the page


def page() -> str:
    """The part of docs/settings.md that is made from the table."""
    lines: list[str] = []
    for group in GROUPS:
        lines += [f"### {group}", "", "| Flag | Default | |", "| --- | --- | --- |"]
        for flag in FLAGS:
            if flag.group == group and not flag.private:
                lines.append(_row(flag))
        lines.append("")
    return "\n".join(lines)


def differences() -> str:
    """Where a default is not Triton's."""
    return "\n".join(f"- `--{flag.name}` is {flag.default_text}, there {flag.triton}." for flag in FLAGS if flag.triton)


def _row(flag: Flag) -> str:
    name = f"`--{flag.name}{' ' + flag.metavar if flag.metavar else ''}`"
    if flag.alias:
        name += f", `--{flag.alias}`"
    if flag.instead:
        return f"| {name} | | deprecated: {flag.help} |"
    return f"| {name} | {flag.default_text} | {flag.help} |".replace("|  |", "| |")
