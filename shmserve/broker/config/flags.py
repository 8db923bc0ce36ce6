"""The flags of `shmserve serve`, with Triton's names: one table for the command line, the environment, the
configuration file and docs/settings.md.

Invariant: a flag is defined only by its row. settings.py checks dependencies between values.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shmserve.broker.config.flag import ENVIRONMENT, UNITS, Flag
from shmserve.broker.config.triton_flags import TRITON, TRITON_FLAGS, decimal, fraction
from shmserve.broker.listeners import access
from shmserve.broker.observability import metric_settings, traces
from shmserve.broker.observability.log_throttle import Rate
from shmserve.broker.observability.logs import FORMATS
from shmserve.broker.processes.cpus import host_policy
from shmserve.broker.processes.gpus import xids
from shmserve.core import limits
from shmserve.core.owners.rate_limiter import ANY, SHARED
from shmserve.errors import InvalidRequest
from shmserve.gateway_options import OPTIONS, Option
from shmserve.repo.remote.address import RemoteAddress, is_remote, parse_address
from shmserve.repo.storage.generation import FILE_BYTES, TOTAL_BYTES
from shmserve.system.busy_poll import DEFAULT_POLL_US, MIN_CORES

REQUIRED = "required unless files are given"
SECONDS = 1e6
"""Upper bound of a time in seconds."""
_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")


MODELS, LOADING, INSTANCES, MEMORY = "Models", "Loading", "Instances and cores", "Memory"
ACCESS, ENDPOINTS, STOPPING = "Access and limits", "Network endpoints", "Stopping"
LOGGING, SERVICE = "Logging", "Service"
GROUPS = (MODELS, LOADING, INSTANCES, MEMORY, ACCESS, ENDPOINTS, STOPPING, LOGGING, SERVICE, TRITON)


def _old_trace(name: str, setting: str, metavar: str) -> Flag:
    return Flag(f"trace-{name}", "trace", LOGGING, f"use --trace-config {setting}=", [], metavar,
                repeatable=True, replaced_by="trace-config", setting=setting)  # fmt: skip


def _passed_on(option: Option) -> Flag:
    """The flag for an option of `shmserve gateway`. Has no default, so that only options that were set are passed on.
    Kinds that `serve` does not parse are passed on as text."""
    return Flag(
        option.name,
        option.kind if option.kind in ("boolean", "integer", "path") else "text",
        ENDPOINTS,
        f"{option.help}; may be given several times" if option.repeatable else option.help,
        [] if option.repeatable else None,
        "" if option.kind == "boolean" else option.metavar,
        option.repeatable,
        minimum=option.minimum,
        maximum=option.maximum if option.kind == "integer" else None,
        shown=option.default_text,
        triton=option.triton,
        gateway=option.sets or option.name,
        compatible=option.compatible,
    )


FLAGS = (
    Flag("model-repository", "repository", MODELS, "directory with one subdirectory per model, or s3://, gs://, as://, "
         "http(s):// or hf:// URL of one; may be given several times",
         [], "DIR", repeatable=True, alias="model-store", shown=REQUIRED),
    Flag("remote-cache-directory", "path", MODELS, "directory for the files of models in remote repositories", None,
         "DIR", shown="~/.cache/shmserve/remote"),
    Flag("remote-cache-size", "bytes", MODELS, "limit of that directory; files that no model uses are removed, the "
         "least recently used first", 100 << 30, "BYTES", minimum=1),
    Flag("remote-connections", "integer", MODELS, "number of files, and of pieces of files, that are downloaded at a "
         "time", 8, "N", minimum=1),
    Flag("model-control-mode", "choice", MODELS, "none: load all models at start; poll: also follow changes in the "
         "repositories; explicit: load only what --load-model and clients request",
         "none", "MODE", choices=("none", "poll", "explicit")),
    Flag("load-model", "text", MODELS, "in mode explicit, a model to load at start; may be given several times; * alone"
         " loads all", [], "MODEL", repeatable=True),
    Flag("repository-poll-secs", "seconds", MODELS, "in mode poll, interval between checks for changes; 0: never",
         15.0, "S"),
    Flag("settle-secs", "seconds", MODELS, "in mode poll, load a changed model when its files have not changed for "
         "this time, so that no half-copied model is loaded", 1.0, "S"),
    Flag("model-config-name", "text", MODELS, "use configs/NAME.pbtxt instead of config.pbtxt for each model that "
         "has it", "", "NAME"),
    Flag("model-namespacing", "boolean", MODELS, "only false: model names are unique across all repositories", False),
    Flag("disable-auto-complete-config", "boolean", LOADING, "use configurations as written; a model with an "
         "incomplete one fails to load", False),
    Flag("strict-model-config", "boolean", LOADING, "use --disable-auto-complete-config",
         replaced_by="disable-auto-complete-config"),
    Flag("backend-config", "setting", LOADING, "a setting for one backend, or for all if BACKEND is omitted; e.g. "
         "onnxruntime,default-max-batch-size=8; may be given several times", [], "BACKEND,KEY=VALUE", repeatable=True),
    Flag("backend-directory", "path", LOADING, "directory of custom backends, each in NAME/backend.py or NAME/model.py",
         None, "DIR", shown="none"),
    Flag("repoagent-directory", "path", LOADING, "directory of custom repository agents, each in NAME/agent.py", None,
         "DIR", shown="none"),
    Flag("repoagent-config", "setting", LOADING, "a parameter for one repository agent, or for all if AGENT is "
         "omitted; takes precedence over that of a model; e.g. signature,public_key_file=/etc/shmserve/models.pem; may "
         "be given several times", [], "AGENT,KEY=VALUE", repeatable=True),
    Flag("require-repoagent", "text", LOADING, "refuse models whose configuration does not use this repository "
         "agent; may be given several times", [], "AGENT", repeatable=True),
    Flag("repoagent-limit-secs", "seconds", LOADING, "kill the repository agents of a model that take longer than "
         "this; 0: no limit", 300.0, "S"),
    Flag("model-load-thread-count", "integer", LOADING, "number of instances that load in parallel", 4, "N", minimum=1),
    Flag("model-load-retry-count", "integer", LOADING, "number of retries after a model fails to load",
         0, "N"),
    Flag("model-environment", "text", LOADING, "also pass this environment variable of the server to models; HF_*: "
         "all with that prefix; *: all except the server's own; may be given several times", [], "NAME",
         repeatable=True, shown="none", compatible=["*"], triton="all variables, which may hold secrets"),
    Flag("strict-readiness", "boolean", LOADING, "ready only when every model is READY; false: ready when loading has "
         "finished", True),
    Flag("exit-on-error", "boolean", LOADING, "exit if a model fails to load at start; false: serve the others",
         False, triton="true; here the other models are served, and readiness reports the failed one",
         compatible=True),
    Flag("execution-limit-secs", "seconds", INSTANCES, "kill a worker that runs one batch for longer than this; "
         "a model's parameter execution_limit_secs takes precedence; 0: no limit", 300.0, "S"),
    Flag("crash-limit", "integer", INSTANCES, "consecutive crashes, without a completed batch in between, after which "
         "an instance is given up; it is quarantined if other instances complete batches meanwhile; a model's "
         "parameter crash_limit takes precedence; 0: never", 3, "N"),
    Flag("load-nice", "integer", LOADING, "how much a worker lowers its priority (nice value) while it loads, once the "
         "server is ready, so that requests take precedence; at most 19; 0: not at all", 5, "N"),
    Flag("idle-unload-secs", "seconds", LOADING, "end the processes of a model that had no request for this time; the "
         "next request starts them again; a model's parameter idle_unload_secs takes precedence; 0: never", 0.0, "S",
         shown="never"),
    Flag("load-limit-secs", "seconds", LOADING, "kill a worker that takes longer than this to load; the load fails; 0: "
         "no limit", 1800.0, "S"),
    Flag("prepared-process", "boolean", INSTANCES, "fork workers from a process that has the common imports loaded; "
         "false: start a new interpreter for each, which takes longer and more memory", True),
    Flag("host-policy", "policy", INSTANCES, "CPU cores for the instances of a host policy: NAME,cpu-cores=0-3,8, or "
         "NAME,numa-node=N for all of a node; instances without a policy use 'cpu' or 'gpu_DEVICE'; may be given "
         "several times", [], "NAME,KEY=VALUE", repeatable=True),
    Flag("busy-poll-us", "integer", INSTANCES, "longest time that the broker and the workers poll for the next message "
         "before they sleep; an idle server does not poll; 0: never poll", None, "N",
         shown=f"{DEFAULT_POLL_US}, or 0 with less than {MIN_CORES} cores"),
    Flag("gpu-health", "boolean", INSTANCES, "take a failed GPU out of service: end its instances, and start them "
         "again when it has recovered", True),
    Flag("gpu-xid", "xid", INSTANCES, "whether an Xid (error number of NVIDIA's driver) takes its GPU out of "
         "service: 74=fatal, 119=ignore; may be given several times", [], "NUMBER=ACTION", repeatable=True),
    Flag("rate-limit", "choice", INSTANCES, "execution_count: an instance runs a batch only while it holds the "
         "resources of its rate_limiter; off: as soon as it is idle", "off", choices=("off", "execution_count")),
    Flag("rate-limit-resource", "resource", INSTANCES, "units of a resource: on each device or, if it is "
         "global, of all devices together; with DEVICE only on that device; default: the most that any one instance "
         "requests; may be given several times",
         [], "NAME:COUNT[:DEVICE]", repeatable=True),
    Flag("cache-config", "cache", MEMORY, "size of the response cache, for models with response_cache", 0,
         "local,size=BYTES", shown="no cache"),
    Flag("response-cache-byte-size", "bytes", MEMORY, "older form of --cache-config local,size=BYTES", 0, "N"),
    Flag("broker-arena-bytes", "bytes", MEMORY, "memory for tensors received inside messages (frames)", 256 << 20, "N",
         minimum=1 << 20),
    Flag("pinned-memory-pool-byte-size", "bytes", MEMORY,
         "host memory of clients that one GPU instance may pin; 0: none", 256 << 20, "N"),
    Flag("cuda-memory-pool-byte-size", "pool", MEMORY, "GPU memory that one instance may use for tensors that "
         "stay on the GPU; for all GPUs, or for one; 0: none; may be given several times", [], "[GPU:]N",
         repeatable=True, shown="1 GiB", triton="64 MiB per GPU for the whole server; here each instance has its own"),
    Flag("worker-output-bytes", "bytes", MEMORY, "memory that one instance may use for its outputs", 4 << 30, "N",
         minimum=1 << 20),
    Flag("model-memory-budget", "bytes", MEMORY, "memory limit for the instances of all models together; unused models "
         "are put to sleep when others need memory, and requests wake them; 0: no limit", 0, "N", shown="no limit"),
    Flag("gpu-memory-budget", "pool", MEMORY, "same as --model-memory-budget, for the memory of each GPU, or of "
         "one; may be given several times", [], "[GPU:]N", repeatable=True, shown="no limit"),
    Flag("model-memory-wait-ms", "integer", MEMORY, "with a memory budget, how long a busy model must have served, and "
         "another one must have waited for memory, before the busy one is put to sleep", 500, "N", minimum=1),
    Flag("instance-memory-limit", "bytes", MEMORY, "kill an instance whose process uses more private memory; a "
         "model's parameter memory_limit_mb takes precedence; 0: no limit", 0, "N", shown="no limit"),
    Flag("instance-gpu-memory-limit", "bytes", MEMORY, "kill an instance whose process uses more memory on its GPU; "
         "a model's parameter gpu_memory_limit_mb takes precedence; 0: no limit", 0, "N", shown="no limit"),
    Flag("override-bytes", "bytes", MEMORY, "limit on the total size of the files in one load call", 1 << 30, "N"),
    Flag("generation-bytes", "bytes", MEMORY, "limit on the bytes of a version's small files that are copied to the "
         "runtime directory at load, for restarted instances to load from; the other files are linked", TOTAL_BYTES,
         "N"),
    Flag("generation-file-bytes", "bytes", MEMORY, "size limit of a file that --generation-bytes copies", FILE_BYTES,
         "N"),
    Flag("socket-group", "group", ACCESS, "group whose members may connect to the lane, with the roles infer and "
         "observe", None, "NAME", shown="only the server's user"),
    Flag("access", "access", ACCESS, "grant the roles infer, observe or operate to uid:N, gid:N, user:NAME, "
         "group:NAME, or * for all that can connect; may be given several times", [], "WHO=ROLE,ROLE",
         repeatable=True),
    Flag("limit", "limit", ACCESS, "a limit from docs/security.md, e.g. client_requests=1000; may be given several "
         "times", [], "NAME=VALUE", repeatable=True),
    Flag("no-gateway", "boolean", ENDPOINTS, "start no gateway: no HTTP, gRPC or metrics ports; a gateway that is "
         "started separately can still serve", False),
    Flag("gateways", "integer", ENDPOINTS, "number of gateway processes that share the ports; the kernel distributes "
         "connections", 1, "N", minimum=1),
    *(_passed_on(option) for option in OPTIONS if option.serve),
    Flag("gateway-args", "text", ENDPOINTS, "further options of `shmserve gateway`, as one string: "
         "--gateway-args='--http-idle-timeout 60'", None, "WORDS"),
    Flag("exit-timeout-secs", "seconds", STOPPING, "on shutdown, time for requests in flight; then all processes are "
         "killed", 30.0, "S"),
    Flag("log-verbose", "integer", LOGGING, "1: more detail; 2: also each batch and why it was formed", 0, "N"),
    Flag("allow-gpu-metrics", "boolean", LOGGING, "export metrics of GPUs, if there are any", True),
    Flag("allow-cpu-metrics", "boolean", LOGGING, "export metrics of the machine's CPU and memory", True),
    Flag("metrics-interval-ms", "integer", LOGGING, "sampling interval of GPU and CPU metrics; 0: every 2 s, and the "
         "metrics text is built for every request, without a limit on its CPU time", 2000, "N"),
    Flag("metrics-config", "metrics", LOGGING, "latency metrics to collect: counter_latencies=BOOL (true), "
         "histogram_latencies=BOOL and summary_latencies=BOOL (false), "
         "summary_quantiles=QUANTILE:ERROR,... (0.5:0.05,0.9:0.01,0.95:0.001,0.99:0.001,0.999:0.001); may be given "
         "several times", [], "NAME=VALUE", repeatable=True),
    Flag("log-info", "boolean", LOGGING, "log informational messages", True),
    Flag("log-warning", "boolean", LOGGING, "log warnings", True),
    Flag("log-error", "boolean", LOGGING, "log errors", True),
    Flag("log-format", "choice", LOGGING, "default: local time, level, text; ISO8601: the same with the time in UTC; "
         "json: one object per line",
         "default", "FORM", choices=FORMATS),
    Flag("log-file", "path", LOGGING, "append to this file instead of the console; to rotate it, rename it",
         None, "FILE", shown="console"),
    Flag("log-worker-lines", "integer", LOGGING, "lines per second that are logged of the output of one worker or "
         "gateway; dropped lines are counted; 0: no limit", Rate().lines, "N"),
    Flag("log-worker-bytes", "bytes", LOGGING, "bytes per second that are logged of the output of one worker or "
         "gateway; 0: no limit", Rate().bytes, "N"),
    Flag("log-recent-bytes", "bytes", LOGGING, "memory for the latest records, which `shmserve logs` shows; 0: none",
         1 << 20, "N"),
    Flag("trace-config", "trace", LOGGING, "requests to trace, and the trace file: triton,file=FILE, "
         "triton,log-frequency=N, level=TIMESTAMPS or TENSORS, rate=N (every N-th), count=N (at most N); "
         "mode=opentelemetry: to a collector, opentelemetry,url=URL; may be given several times",
         [], "KEY=VALUE", repeatable=True),
    _old_trace("file", "triton,file", "FILE"),
    _old_trace("level", "level", "LEVEL"),
    _old_trace("rate", "rate", "N"),
    _old_trace("count", "count", "N"),
    _old_trace("log-frequency", "triton,log-frequency", "N"),
    Flag("id", "text", SERVICE, "the server's name in its metadata", "shmserve", "NAME",
         triton="triton; the name tells programs which server it is", compatible="triton"),
    Flag("triton-compatible", "boolean", SERVICE, "use Triton's defaults where they differ; flags that are set take "
         "precedence", False),
    Flag("runtime-dir", "path", SERVICE, "directory of the sockets", None, "DIR",
         shown="/run/shmserve if writable, else $XDG_RUNTIME_DIR/shmserve, else a temporary directory"),
    Flag("config", "path", SERVICE, "TOML file with flags as keys; the command line and the environment take "
         "precedence", None, "FILE"),
    Flag("environment-dir", "path", SERVICE, "directory to which archives of EXECUTION_ENV_PATH are unpacked, once "
         "each", None, "DIR",
         shown="environments in $CACHE_DIRECTORY, else in shmserve in the user's cache directory"),
    *TRITON_FLAGS,
    Flag("hints", "boolean", SERVICE, "when ready, print commands to try", False, private=True),
    Flag("ready-fd", "integer", SERVICE, "file descriptor to which READY is written", -1, "FD", private=True),
)  # fmt: skip
BY_NAME = {name: flag for flag in FLAGS for name in (flag.name, flag.alias) if name}


def unknown(name: str, shown: str, prefix: str = "--") -> str:
    """Error text for an unknown name. `shown`: the name as it was written. `prefix`: prefix of the suggested name."""
    close = nearest(name.replace("_", "-").lower())
    return f"{shown} is unknown" + (f"; did you mean {prefix}{written(close, prefix)}?" if close else "")


def completions(name: str) -> list[str]:
    """The flags that `name` abbreviates: none if it is a flag itself."""
    if name in BY_NAME or name in ("", "help", "help-all"):
        return []
    flags = {
        flag.dest: known for known, flag in reversed(BY_NAME.items()) if not flag.private and known.startswith(name)
    }
    return sorted([*flags.values(), *(known for known in ("help", "help-all") if known.startswith(name))])


def nearest(name: str, cutoff: float = 0.6) -> str:
    names = [known for known, flag in BY_NAME.items() if not flag.private]
    return next(iter(get_close_matches(name, names, 1, cutoff)), "")


def written(name: str, prefix: str) -> str:
    """A flag's name in the form that follows this prefix."""
    return name.replace("-", "_").upper() if prefix == ENVIRONMENT else name


# ------------------------------------------------------------------------------------------------- values


def from_text(flag: Flag, text: str) -> Any:
    """Parses one value from the command line or a variable. Raises ValueError."""
    match flag.kind:
        case "boolean":
            return _boolean(text)
        case "integer" | "bytes":
            return _integer(flag, text)
        case "seconds":
            return _seconds(text)
        case "choice":
            return _choice(flag, text)
        case "setting":
            return _setting(text)
        case "policy":
            return host_policy(text)
        case "xid":
            return xids.rule(text)
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
        case "repository" if is_remote(text):
            return _address(text)
    if not text and flag.default != "":
        raise ValueError(f"expected a {flag.metavar or 'value'}, found nothing")
    return Path(text) if flag.kind in ("path", "repository") else text


def _address(text: str) -> RemoteAddress:
    try:
        return parse_address(text)
    except InvalidRequest as error:
        raise ValueError(error.message) from None


def from_environment(flag: Flag, text: str) -> Any:
    """Parses a variable. Values of a repeatable flag are separated by ':' if all are paths, otherwise by ';'."""
    if not flag.repeatable:
        return from_text(flag, text)
    are_paths = flag.kind == "path" or (flag.kind == "repository" and not is_remote(text))
    return [from_text(flag, part) for part in text.split(":" if are_paths else ";") if part]


def from_toml(flag: Flag, value: Any, folder: Path) -> Any:
    """Parses a value of the configuration file. Paths are relative to `folder`, the file's directory. Raises
    ValueError."""
    if flag.repeatable:
        values = value if isinstance(value, list) else [value]
        return [_one_from_toml(flag, one, folder) for one in values]
    return _one_from_toml(flag, value, folder)


def _one_from_toml(flag: Flag, value: Any, folder: Path) -> Any:
    types: tuple[tuple[type, ...], str]
    match flag.kind:
        case "boolean":
            types = (bool,), "true or false"
        case "integer":
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
    """Size of the response cache in bytes."""
    name, _, setting = text.partition(",")
    key, _, value = setting.partition("=")
    if name != "local":
        raise ValueError(f"unknown cache '{name}'; expected local,size=BYTES")
    if key != "size":
        raise ValueError(f"unknown cache setting '{setting}'; expected size=BYTES")
    return _number(value, True, 1)


def _pool(text: str) -> tuple[int, int]:
    """Returns (GPU, bytes); GPU -1: all GPUs."""
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


def _integer(flag: Flag, text: str) -> int:
    value = _number(text, flag.kind == "bytes", None if flag.private else flag.minimum)
    if flag.maximum is not None and value > flag.maximum:
        raise ValueError(f"{text} is too large; the maximum is {flag.maximum}")
    return value


def _number(text: str, is_bytes: bool, minimum: int | None) -> int:
    match = re.fullmatch(r"(-?[0-9]{1,18})\s*([a-zA-Z]*)", text.strip())
    unit = UNITS.get(match[2].upper()) if match and (is_bytes or not match[2]) else None
    if match is None or unit is None:
        more = ", optionally with the suffix KiB, MiB or GiB" if is_bytes else ""
        raise ValueError(f"'{text}' is not a whole number{more}")
    value = int(match[1]) * unit
    if minimum is not None and value < minimum:
        raise ValueError(f"{text} is too small; the minimum is {minimum}")
    return value


def _limit(text: str) -> tuple[str, int]:
    """Parses NAME=VALUE. Names may contain dashes in place of underscores."""
    given, equals, value = text.partition("=")
    name = given.strip().replace("-", "_")
    rows = {row.name: row for row in limits.NAMED}
    if not equals:
        raise ValueError(f"'{text}' is not NAME=VALUE")
    if name not in rows:
        close = get_close_matches(name, rows, 1)
        raise ValueError(f"unknown limit '{given}'" + (f"; did you mean {close[0]}?" if close else ""))
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
    """Ignores case, as Triton does."""
    for choice in flag.choices:
        if text.lower() == choice.lower():
            return choice
    close = get_close_matches(text.lower(), [choice.lower() for choice in flag.choices], 1)
    meant = next((choice for choice in flag.choices if close and choice.lower() == close[0]), "")
    more = f"; did you mean {meant}?" if meant else ""
    raise ValueError(f"'{text}' is not one of {', '.join(flag.choices)}{more}")


def _setting(text: str) -> tuple[str, str]:
    """`onnxruntime,key=value` -> ("onnxruntime,key", "value"); `key=value` is for all backends: (",key", "value")."""
    name, given, value = text.partition("=")
    backend, comma, key = name.rpartition(",")
    if not given or not key or (comma and not backend) or "," in backend:
        raise ValueError(f"'{text}' is neither BACKEND,KEY=VALUE nor KEY=VALUE")
    return f"{backend},{key}", value
