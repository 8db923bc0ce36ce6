"""The flags of `shmserve serve` and `shmserve gateway`, with Triton's names: one table for the command lines, the
environment, the configuration file and docs/settings.md.

Invariant: a flag is defined only by its row. broker/config/settings.py checks dependencies between values. This module
imports little, so that `shmserve --help` is fast.
"""

from __future__ import annotations

from typing import Any

from shmserve.protocol.roles import ROLES
from shmserve.settings.flag import ENVIRONMENT, Flag, nearest_name
from shmserve.settings.triton_flags import TRITON_FLAGS


def _switch(name: str, help_: str, default: bool, **more: Any) -> Flag:
    return Flag(name, "boolean", "", help_, default, **more)


def _text(name: str, metavar: str, help_: str, default: Any = None, **more: Any) -> Flag:
    return Flag(name, "text", metavar, help_, default, **more)


def _each(name: str, kind: str, metavar: str, help_: str, **more: Any) -> Flag:
    """A flag that may be given several times."""
    return Flag(name, kind, metavar, help_, [], repeatable=True, **more)


def _path(name: str, metavar: str, help_: str, shown: str = "", **more: Any) -> Flag:
    return Flag(name, "path", metavar, help_, shown=shown, **more)


def _number(name: str, metavar: str, help_: str, default: Any, **more: Any) -> Flag:
    return Flag(name, "integer", metavar, help_, default, **more)


def _bytes(name: str, help_: str, default: Any, **more: Any) -> Flag:
    return Flag(name, "bytes", "BYTES", help_, default, **more)


def _seconds(name: str, help_: str, default: float, **more: Any) -> Flag:
    return Flag(name, "seconds", "S", help_, default, **more)


def _port(name: str, help_: str, default: int) -> Flag:
    return _number(name, "N", f"{help_}; 0: any free port", default, maximum=65535)


def _milliseconds(name: str, help_: str, default: int, minimum: int = 0) -> Flag:
    return _number(name, "MS", help_, default, minimum=minimum, maximum=2**31 - 1)


def _old_trace(name: str, setting: str, metavar: str) -> Flag:
    text = f"use --trace-config {setting}="
    return _each(f"trace-{name}", "trace", metavar, text, replaced_by="trace-config", setting=setting)


REQUIRED = "required unless files are given"
_ALL_ROLES = "all roles for every caller; here loading models and changing settings must be granted"
_LOCAL = "0.0.0.0; here the server accepts only local connections by default"
_LIMIT = _each("limit", "limit", "NAME=VALUE", "set a limit of docs/security.md, such as client_requests=1000")
_EXIT_TIMEOUT = _seconds(
    "exit-timeout-secs",
    "time for the requests in flight when the server stops; then they fail, and all processes are killed",
    30.0,
)

SERVER: dict[str, tuple[Flag, ...]] = {
    "Models": (
        _each(
            "model-repository",
            "repository",
            "DIR",
            "serve the models of this directory, which has one subdirectory per model, or of a URL: s3://, gs://, "
            "as://, http(s):// or hf://",
            alias="model-store",
            shown=REQUIRED,
        ),
        Flag(
            "model-control-mode",
            "choice",
            "MODE",
            "none: load all models at start; poll: also follow changes in the repositories; explicit: load only what "
            "--load-model and clients request",
            "none",
            choices=("none", "poll", "explicit"),
        ),
        _each("load-model", "text", "MODEL", "load this model at start, in mode explicit; * alone loads all models"),
        _seconds("repository-poll-secs", "interval between checks for changes, in mode poll; 0: never check", 15.0),
        _switch(
            "model-namespacing",
            "let models in different repositories have the same name: an ensemble uses those of its own repository, "
            "and a caller names an ambiguous model with its repository, as REPOSITORY/MODEL",
            False,
        ),
        _text("model-config-name", "NAME", "use configs/NAME.pbtxt of each model that has it, not config.pbtxt", ""),
        _path(
            "cache-directory",
            "DIR",
            "keep downloaded models and unpacked environments in this directory",
            "$CACHE_DIRECTORY, else shmserve in the user's cache directory",
            triton="the directory of its response caches; here the response cache is built in",
        ),
        _bytes(
            "remote-cache-size",
            "limit of the downloaded models; at the limit, files that no model uses are removed, the least recently "
            "used first",
            100 << 30,
            minimum=1,
        ),
    ),
    "Loading": (
        _switch(
            "disable-auto-complete-config",
            "use configurations as they are written; a model whose configuration is incomplete fails to load",
            False,
        ),
        Flag(
            "strict-model-config",
            "boolean",
            "",
            "use --disable-auto-complete-config",
            replaced_by="disable-auto-complete-config",
        ),
        _each(
            "backend-config",
            "setting",
            "BACKEND,KEY=VALUE",
            "change a setting of one backend, or of all if BACKEND is omitted: onnxruntime,default-max-batch-size=8",
        ),
        _path(
            "backend-directory",
            "DIR",
            "use backends of this directory: NAME/backend.py, NAME/model.py or NAME/libtriton_NAME.so",
            "none",
        ),
        _path("repoagent-directory", "DIR", "use the repository agents NAME/agent.py of this directory", "none"),
        _each(
            "repoagent-config",
            "setting",
            "AGENT,KEY=VALUE",
            "set a parameter of one repository agent, or of all if AGENT is omitted; it takes precedence over that of "
            "a model: signature,public_key_file=/etc/shmserve/models.pem",
        ),
        _each("require-repoagent", "text", "AGENT", "refuse models that do not use this repository agent"),
        _number("model-load-thread-count", "N", "number of instances that load at the same time", 4, minimum=1),
        _number("model-load-retry-count", "N", "number of retries after a model has failed to load", 0),
        _each(
            "model-environment",
            "text",
            "NAME",
            "pass this environment variable of the server to models; HF_*: all with that prefix; *: all except the "
            "server's own",
            shown="none",
            compatible=["*"],
            triton="all variables, which may hold secrets",
        ),
        _switch(
            "strict-readiness",
            "the server is ready only when every model is READY; false: when loading has finished",
            True,
        ),
        _switch(
            "exit-on-error",
            "exit if a model fails to load at start; false: serve the others",
            False,
            triton="true; here the other models are served, and readiness reports the failed one",
            compatible=True,
        ),
        _seconds(
            "idle-unload-secs",
            "end the processes of a model that had no request for this time, until the next request; a model's "
            "parameter idle_unload_secs takes precedence; 0: never",
            0.0,
            shown="never",
        ),
        _seconds(
            "load-limit-secs",
            "fail the load of a model whose worker or repository agents take longer than this; 0: no limit",
            1800.0,
        ),
    ),
    "Instances and cores": (
        _seconds(
            "execution-limit-secs",
            "kill a worker that runs one batch for longer than this; a model's parameter execution_limit_secs takes "
            "precedence; 0: no limit",
            300.0,
        ),
        _number(
            "crash-limit",
            "N",
            "give up an instance after this number of crashes without a completed batch in between, or quarantine it "
            "if other instances complete batches; a model's parameter crash_limit takes precedence; 0: never",
            3,
        ),
        _each(
            "host-policy",
            "policy",
            "NAME,KEY=VALUE",
            "pin the instances of a host policy to cores: NAME,cpu-cores=0-3,8, or NAME,numa-node=N for all of a node; "
            "instances without a policy use 'cpu' or 'gpu_DEVICE'",
        ),
        _switch(
            "gpu-health",
            "take a failed GPU out of service: end its instances, and start them again when it has recovered",
            True,
        ),
        _each(
            "gpu-xid",
            "xid",
            "NUMBER=ACTION",
            "decide whether an Xid, an error number of NVIDIA's driver, takes its GPU out of service: 74=fatal",
        ),
        Flag(
            "rate-limit",
            "choice",
            "MODE",
            "execution_count: an instance runs a batch only while it holds the resources of its rate_limiter; off: as "
            "soon as it is idle",
            "off",
            choices=("off", "execution_count"),
        ),
        _each(
            "rate-limit-resource",
            "resource",
            "NAME:COUNT[:DEVICE]",
            "units of a resource on each device or, if it is global, on all devices together; with DEVICE only on that "
            "device; default: the largest number that one instance requests",
        ),
    ),
    "Memory": (
        Flag(
            "cache-config",
            "cache",
            "local,size=BYTES",
            "size of the response cache, for models with response_cache",
            0,
            shown="no cache",
        ),
        _bytes("response-cache-byte-size", "older form of --cache-config local,size=BYTES", 0),
        _bytes(
            "broker-arena-bytes", "memory for tensors that arrive inside messages (frames)", 256 << 20, minimum=1 << 20
        ),
        _bytes(
            "pinned-memory-pool-byte-size", "host memory of clients that one GPU instance may pin; 0: none", 256 << 20
        ),
        _each(
            "cuda-memory-pool-byte-size",
            "pool",
            "[GPU:]BYTES",
            "GPU memory that one instance may use for tensors that stay on the GPU, for all GPUs or for one; 0: none",
            shown="1 GiB",
            triton="64 MiB per GPU for the whole server; here each instance has its own",
        ),
        _bytes("worker-output-bytes", "memory that one instance may use for its outputs", 4 << 30, minimum=1 << 20),
        _bytes(
            "model-memory-budget",
            "memory for the instances of all models together; unused models sleep while others need the memory, and "
            "requests wake them; 0: no limit",
            0,
            shown="no limit",
        ),
        _each(
            "gpu-memory-budget",
            "pool",
            "[GPU:]BYTES",
            "as --model-memory-budget, for the memory of each GPU, or of one",
            shown="no limit",
        ),
        _bytes(
            "instance-memory-limit",
            "kill an instance whose process uses more private memory; a model's parameter memory_limit_mb takes "
            "precedence; 0: no limit",
            0,
            shown="no limit",
        ),
        _bytes(
            "instance-gpu-memory-limit",
            "kill an instance whose process uses more memory on its GPU; a model's parameter gpu_memory_limit_mb takes "
            "precedence; 0: no limit",
            0,
            shown="no limit",
        ),
    ),
    "Access and limits": (
        Flag(
            "socket-group",
            "group",
            "NAME",
            "let the members of this group connect to the lane, with the roles infer and observe",
            shown="only the server's user",
        ),
        _each(
            "access",
            "access",
            "WHO=ROLE,ROLE",
            "grant the roles infer, observe or operate to uid:N, gid:N, user:NAME, group:NAME, or * for all that can "
            "connect",
        ),
        _LIMIT,
    ),
    "Stopping": (_EXIT_TIMEOUT,),
    "Logging": (
        _number(
            "log-verbose", "N", "1: log more detail; 2: also each batch, why it was formed, and each failed request", 0
        ),
        _switch("allow-gpu-metrics", "export metrics of the GPUs", True),
        _switch("allow-cpu-metrics", "export metrics of the machine's CPU and memory", True),
        _number(
            "metrics-interval-ms",
            "MS",
            "sampling interval of GPU and CPU metrics; 0: every 2 s, and the metrics are rendered for every request, "
            "without a limit on their CPU time",
            2000,
        ),
        _each(
            "metrics-config",
            "metrics",
            "NAME=VALUE",
            "collect latency metrics: counter_latencies=BOOL (true), histogram_latencies=BOOL and "
            "summary_latencies=BOOL (false), summary_quantiles=QUANTILE:ERROR,... "
            "(0.5:0.05,0.9:0.01,0.95:0.001,0.99:0.001,0.999:0.001)",
        ),
        _switch("log-info", "log informational messages", True),
        _switch("log-warning", "log warnings", True),
        _switch("log-error", "log errors", True),
        Flag(
            "log-format",
            "choice",
            "FORMAT",
            "default: local time, level, text; ISO8601: the same with the time in UTC; json: one object per line",
            "default",
            choices=("default", "ISO8601", "json"),
        ),
        _path("log-file", "FILE", "append the log to this file, which is opened again after it was renamed", "console"),
        _each(
            "trace-config",
            "trace",
            "KEY=VALUE",
            "trace requests to a file: triton,file=FILE, triton,log-frequency=N, level=TIMESTAMPS or TENSORS, rate=N "
            "(every N-th), count=N (at most N); or to a collector: mode=opentelemetry, opentelemetry,url=URL",
        ),
        _old_trace("file", "triton,file", "FILE"),
        _old_trace("level", "level", "LEVEL"),
        _old_trace("rate", "rate", "N"),
        _old_trace("count", "count", "N"),
        _old_trace("log-frequency", "triton,log-frequency", "N"),
    ),
    "Service": (
        _text(
            "id",
            "NAME",
            "the server's name in its metadata",
            "shmserve",
            triton="triton; the name tells programs which server it is",
            compatible="triton",
        ),
        _switch(
            "triton-compatible", "use Triton's defaults where they differ; flags that are set take precedence", False
        ),
        _path(
            "runtime-dir",
            "DIR",
            "directory of the server's sockets",
            "/run/shmserve if writable, else $XDG_RUNTIME_DIR/shmserve, else a temporary directory",
        ),
        _path("config", "FILE", "read flags from this TOML file; the command line and the environment take precedence"),
        _switch("hints", "print commands to try when the server is ready", False, private=True),
        _number("ready-fd", "FD", "file descriptor to which READY is written", -1, private=True),
    ),
    "Gateways": (
        _switch(
            "no-gateway",
            "start no gateway, and so listen on no port; a gateway that is started separately can serve this server",
            False,
        ),
        _number(
            "gateways",
            "N",
            "number of gateway processes that share the ports; the kernel distributes connections",
            1,
            minimum=1,
        ),
    ),
}
"""The flags of the broker, by group."""

ENDPOINTS: dict[str, tuple[Flag, ...]] = {
    "HTTP": (
        _switch("allow-http", "enable the HTTP endpoint", True),
        _port("http-port", "HTTP port", 8000),
        _text(
            "http-address", "ADDRESS", "address of the HTTP listener", "127.0.0.1", triton=_LOCAL, compatible="0.0.0.0"
        ),
        _switch(
            "http-keep-idle",
            "at a stop, keep idle HTTP connections open until --exit-timeout-secs and answer one more request on each; "
            "false: close them at once",
            False,
            triton="true; here a stop does not wait for callers that send nothing",
            compatible=True,
        ),
        _switch("allow-openai", "enable the OpenAI-compatible endpoints on the HTTP port, /v1", True),
        Flag(
            "http-roles",
            "roles",
            "ROLE,ROLE",
            "roles of HTTP callers, of infer, observe, operate and page (the web page); with --tokens-file, callers "
            "without a token have no role unless this is set",
            shown="infer,observe, and page if --http-address is a loopback address",
            triton=_ALL_ROLES,
            compatible=",".join(ROLES),
        ),
        _text(
            "http-allowed-hosts",
            "NAME,NAME",
            "host names that browsers may use for the HTTP and metrics endpoints, besides localhost and IP addresses; "
            "*: any name",
            shown="none",
        ),
        _text(
            "http-allowed-origins",
            "URL,URL",
            "origins of other web pages that may use the HTTP endpoint, such as https://name:port",
            shown="none",
        ),
        Flag(
            "page-servers",
            "servers",
            "URL,URL",
            "show these servers, such as http://gpu1:8000, together on the web page, and let their pages read this "
            "server's state; use the same list on all of them",
            shown="none",
        ),
        _number(
            "http-max-input-size",
            "BYTES",
            "maximum bytes of a request body over HTTP, also after decompression, and of the inputs of a request over "
            "ZeroMQ",
            64 << 20,
            minimum=1,
        ),
        _switch("reuse-http-port", "allow other servers to listen on the same ports", False),
        _each("http-restricted-api", "HTTP restriction", "API,API:HEADER=VALUE", "require this header for these APIs"),
        _text("http-header-forward-pattern", "REGEX", "pass matching headers to the model as request parameters"),
    ),
    "gRPC": (
        _switch("allow-grpc", "enable the gRPC endpoint", True),
        _port("grpc-port", "gRPC port", 8001),
        _text(
            "grpc-address", "ADDRESS", "address of the gRPC listener", "127.0.0.1", triton=_LOCAL, compatible="0.0.0.0"
        ),
        Flag("grpc-roles", "roles", "ROLE,ROLE", "roles of gRPC callers", shown="as --http-roles"),
        _number(
            "grpc-max-input-size",
            "BYTES",
            "maximum bytes of a message, also after decompression",
            64 << 20,
            minimum=1,
            compatible=2**31 - 1,
        ),
        _switch("reuse-grpc-port", "same as --reuse-http-port", False),
        _each(
            "grpc-restricted-protocol",
            "gRPC restriction",
            "API,API:KEY=VALUE",
            "require the header triton-grpc-protocol-KEY for these APIs",
        ),
        _text("grpc-header-forward-pattern", "REGEX", "same as --http-header-forward-pattern, for gRPC"),
        Flag(
            "grpc-infer-response-compression-level",
            "choice",
            "LEVEL",
            "compression of responses: none, low, medium or high",
            "none",
            choices=("none", "low", "medium", "high"),
        ),
        _milliseconds("grpc-keepalive-time", "idle time before a keepalive ping is sent", 7_200_000, 1),
        _milliseconds("grpc-keepalive-timeout", "maximum time to wait for the reply to a keepalive ping", 20_000, 1),
        _switch(
            "grpc-keepalive-permit-without-calls", "send and accept keepalive pings without calls in flight", False
        ),
        _milliseconds(
            "grpc-http2-min-recv-ping-interval-without-data",
            "minimum interval between pings of a client without data; a shorter one is a strike",
            300_000,
        ),
        _number(
            "grpc-http2-max-ping-strikes",
            "N",
            "number of strikes tolerated before the connection is closed; 0: no limit",
            2,
            maximum=2**31 - 1,
        ),
        _milliseconds("grpc-max-connection-age", "age at which a connection accepts no more calls; 0: no limit", 0),
        _milliseconds(
            "grpc-max-connection-age-grace", "time for the calls of such a connection to finish; 0: no limit", 0
        ),
    ),
    "Prometheus": (
        _switch("allow-metrics", "enable the Prometheus endpoint", True),
        _port("metrics-port", "Prometheus port", 8002),
        _text("metrics-address", "ADDRESS", "address of the Prometheus listener", shown="as --http-address"),
    ),
    "Callers": (
        _text(
            "trusted-proxies",
            "NETWORK,NETWORK",
            "proxies, such as 10.0.0.0/8, whose PROXY header, X-Forwarded-For or Forwarded names the caller",
            shown="none",
        ),
        _path("tokens-file", "FILE", "tokens and their roles; reread on SIGHUP, as are certificates"),
        _switch("allow-client-shm", "allow callers to register shared memory of this machine", False),
        _path("tls-cert", "FILE", "enable TLS on all endpoints, with this certificate chain (PEM)"),
        _path("tls-key", "FILE", "private key of --tls-cert, if not in the same file"),
        _path("tls-client-ca", "FILE", "require client certificates signed by one of these CAs"),
        _switch("grpc-use-ssl", "enable TLS for gRPC with separate certificates", False),
        _path("grpc-server-cert", "FILE", "certificate for gRPC"),
        _path("grpc-server-key", "FILE", "private key for gRPC"),
        _switch("grpc-use-ssl-mutual", "require client certificates for gRPC", False),
        _path("grpc-root-cert", "FILE", "CA certificates for verifying the gRPC client certificates"),
    ),
    "ZeroMQ over TCP": (
        _text(
            "zmq-address",
            "URL",
            "listen for ZeroMQ over TCP here, such as tcp://127.0.0.1:8790; needs the two key files",
            shown="none",
        ),
        _path("zmq-server-key", "FILE", "server key NAME.key, from `shmserve keygen`"),
        _path("zmq-keys", "FILE", "client keys and their roles: lines of PUBLIC-KEY ROLE,ROLE NAME; reread on change"),
    ),
}
"""The flags of the network endpoints, by group. `serve` does not interpret their values, but passes them to its
gateways."""

TRITON = "Triton's flags without effect here"
GROUPS = SERVER | ENDPOINTS | {TRITON: TRITON_FLAGS}
GATEWAY_GROUPS = ENDPOINTS | {"Limits": (_LIMIT, _EXIT_TIMEOUT)}
"""The flags of `shmserve gateway`."""
FLAGS = tuple(flag for flags in GROUPS.values() for flag in flags)
PASSED_ON = tuple(flag for flags in ENDPOINTS.values() for flag in flags)
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
    return nearest_name(name, (known for known, flag in BY_NAME.items() if not flag.private), cutoff)


def written(name: str, prefix: str) -> str:
    """A flag's name in the form that follows this prefix."""
    return name.replace("-", "_").upper() if prefix == ENVIRONMENT else name
