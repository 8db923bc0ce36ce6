"""The options of `shmserve gateway`: one table, from which the gateway and `shmserve serve` build their arguments.

Invariant: an option is defined only by its row. `serve` does not interpret the values, but passes them to its gateways.
This module imports little, so that `shmserve --help` is fast.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from shmserve.protocol.roles import ROLES

HTTP, GRPC, METRICS, LIMITS = "HTTP", "gRPC", "metrics", "limits"
MEMORY, ACCESS, ZMQ = "shared memory", "access control", "ZeroMQ over TCP"


class Option(NamedTuple):
    """`kind` selects the parser in shmserve.gateway.options; `minimum` and `maximum` are the limits of an integer.
    `shown`: a text for a default that is not a value. `sets`: the other option whose value this one sets, if any.
    `serve`: whether `serve` has this option as well; others are passed in --gateway-args. For `serve`, `triton` says
    how Triton's default differs, and `compatible` is the default with --triton-compatible."""

    name: str
    group: str
    kind: str
    metavar: str
    help: str
    default: Any = None
    shown: str = ""
    minimum: int = 0
    maximum: int = 2**63 - 1
    choices: tuple[str, ...] = ()
    repeatable: bool = False
    sets: str = ""
    serve: bool = True
    triton: str = ""
    compatible: Any = None

    @property
    def dest(self) -> str:
        return (self.sets or self.name).replace("-", "_")

    @property
    def default_text(self) -> str:
        """The default as shown to users; empty if there is none."""
        if self.shown or self.default is None:
            return self.shown
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


def _text(group: str, name: str, metavar: str, help_: str, **more: Any) -> Option:
    return Option(name, group, "text", metavar, help_, **more)


def _file(group: str, name: str, help_: str) -> Option:
    return Option(name, group, "path", "FILE", help_)


def _switch(group: str, name: str, default: bool, help_: str, **more: Any) -> Option:
    return Option(name, group, "boolean", "BOOL", help_, default, **more)


def _port(group: str, name: str, default: int, help_: str) -> Option:
    return Option(name, group, "integer", "N", f"{help_}; 0: any free port", default, maximum=65535)


def _size(group: str, name: str, default: int, help_: str, minimum: int = 1, **more: Any) -> Option:
    return Option(name, group, "integer", "BYTES", help_, default, minimum=minimum, **more)


def _number(
    group: str,
    name: str,
    metavar: str,
    default: int,
    help_: str,
    minimum: int = 0,
    maximum: int = 2**31 - 1,
    **more: Any,
) -> Option:
    return Option(name, group, "integer", metavar, help_, default, minimum=minimum, maximum=maximum, **more)


def _seconds(group: str, name: str, default: float, help_: str) -> Option:
    return Option(name, group, "seconds", "SECONDS", help_, default, serve=False)


def _share(kind: str, whose: str) -> Option:
    text = (
        f"maximum calls and input memory of a gateway that one {whose} may have in flight, as a fraction of what the "
        "others leave free; 1: no limit"
    )
    return Option(f"{kind}-share", LIMITS, "fraction", "FRACTION", text, 0.25)


_ALL_ROLES = "all roles for every caller; here loading models and changing settings must be granted"
_LOCAL = "0.0.0.0; here the server accepts only local connections by default"

OPTIONS = (
    _switch(HTTP, "allow-http", True, "enable the HTTP endpoint"),
    _port(HTTP, "http-port", 8000, "HTTP port"),
    _text(HTTP, "http-address", "ADDRESS", "address of the HTTP listener", default="127.0.0.1", triton=_LOCAL,
          compatible="0.0.0.0"),
    _switch(HTTP, "allow-openai", True, "enable the OpenAI-compatible endpoints on the HTTP port, /v1"),
    Option("http-roles", HTTP, "roles", "ROLE,ROLE", "roles of HTTP callers, of infer, observe, operate and "
           "page (the web page); with --tokens-file, callers without a token have no role unless this is set",
           shown="infer,observe, and page if --http-address is a loopback address", triton=_ALL_ROLES,
           compatible=",".join(ROLES)),
    _text(HTTP, "http-allowed-hosts", "NAME,NAME", "host names that browsers may use for the HTTP and "
          "metrics endpoints, besides localhost and IP addresses; *: any name", shown="none"),
    _text(HTTP, "http-allowed-origins", "URL,URL", "origins of other web pages that may use the HTTP endpoint, such as "
          "https://name:port", shown="none"),
    Option("page-servers", HTTP, "servers", "URL,URL", "servers that the web page shows together, such as "
           "http://gpu1:8000; the web pages of these servers may read this server's state; use the same list on all "
           "of them", shown="none"),
    _size(HTTP, "http-max-input-size", 64 << 20, "maximum bytes of a request body, also after decompression"),
    _size(HTTP, "http-max-json-size", 16 << 20, "maximum bytes of JSON in a request to a model; 0: as "
          "--http-max-input-size", 0, compatible=0),
    _size(HTTP, "http-max-held-size", 1 << 30, "maximum total size of received large request bodies",
          serve=False),
    _number(HTTP, "http-max-connections", "N", 4096, "connection limit", 1, 2**63 - 1, serve=False),
    _seconds(HTTP, "http-read-timeout", 60.0, "timeout for a stalled request, or a client that does not read"),
    _size(HTTP, "http-min-data-rate", 1024, "minimum bytes per second; a slower client counts as stalled",
          serve=False),
    _seconds(HTTP, "http-idle-timeout", 600.0, "maximum time between two requests of a connection"),
    _switch(HTTP, "reuse-port", False, "allow several gateways to listen on the same ports", serve=False),
    _switch(HTTP, "reuse-http-port", False, "allow other servers to listen on the same ports", sets="reuse-port"),
    Option("http-restricted-api", HTTP, "HTTP restriction", "API,API:HEADER=VALUE", "require this header for these "
           "APIs", repeatable=True),
    _text(HTTP, "http-header-forward-pattern", "REGEX", "pass matching headers to the model as request parameters"),
    _switch(GRPC, "allow-grpc", True, "enable the gRPC endpoint"),
    _port(GRPC, "grpc-port", 8001, "gRPC port"),
    _text(GRPC, "grpc-address", "ADDRESS", "address of the gRPC listener", default="127.0.0.1", triton=_LOCAL,
          compatible="0.0.0.0"),
    Option("grpc-roles", GRPC, "roles", "ROLE,ROLE", "roles of gRPC callers", shown="as --http-roles"),
    _size(GRPC, "grpc-max-input-size", 64 << 20, "maximum bytes of a message, also after decompression",
          compatible=2**31 - 1),
    _switch(GRPC, "reuse-grpc-port", False, "same as --reuse-http-port", sets="reuse-port"),
    Option("grpc-restricted-protocol", GRPC, "gRPC restriction", "API,API:KEY=VALUE", "require the header "
           "triton-grpc-protocol-KEY for these APIs", repeatable=True),
    _text(GRPC, "grpc-header-forward-pattern", "REGEX", "same as --http-header-forward-pattern, for gRPC"),
    _text(GRPC, "grpc-infer-response-compression-level", "LEVEL", "compression of responses: none, low, medium or "
          "high", default="none", choices=("none", "low", "medium", "high")),
    _number(GRPC, "grpc-keepalive-time", "MS", 7_200_000, "idle time before a keepalive ping is sent", 1),
    _number(GRPC, "grpc-keepalive-timeout", "MS", 20_000, "maximum time to wait for a keepalive ping's acknowledgement",
            1),
    _switch(GRPC, "grpc-keepalive-permit-without-calls", False, "send and accept keepalive pings without calls in "
            "flight"),
    _number(GRPC, "grpc-http2-min-recv-ping-interval-without-data", "MS", 300_000,
            "minimum interval between pings of a client without data; a shorter one is a strike"),
    _number(GRPC, "grpc-http2-max-ping-strikes", "N", 2, "number of strikes tolerated before the connection is closed; "
            "0: no limit"),
    _seconds(GRPC, "grpc-stream-idle-timeout", 3600.0, "maximum idle time of a stream without requests in flight"),
    _number(GRPC, "grpc-max-connection-age", "MS", 0, "age at which a connection accepts no more calls; 0: no limit"),
    _number(GRPC, "grpc-max-connection-age-grace", "MS", 0, "time for the calls of such a connection to finish; "
            "0: no limit"),
    _switch(METRICS, "allow-metrics", True, "enable the Prometheus endpoint"),
    _port(METRICS, "metrics-port", 8002, "Prometheus port"),
    _text(METRICS, "metrics-address", "ADDRESS", "address of the Prometheus listener", shown="as --http-address"),
    _text(ACCESS, "trusted-proxies", "NETWORK,NETWORK", "proxies, such as 10.0.0.0/8, whose PROXY header, "
          "X-Forwarded-For or Forwarded names the caller", shown="none"),
    _share("connection", "connection"),
    _share("address", "address (behind a reverse proxy, all callers share one, unless --trusted-proxies names it)"),
    _share("token", "token or ZeroMQ key"),
    _size(LIMITS, "memory-bytes", 4 << 30, "maximum shared memory for input tensors", serve=False),
    _number(LIMITS, "busy-poll-us", "N", 0, "maximum time to poll for responses before sleeping", serve=False),
    _seconds(LIMITS, "exit-timeout-secs", 30.0, "time for requests in flight to finish on shutdown"),
    _switch(MEMORY, "allow-client-shm", False, "allow callers to register shared memory of this machine"),
    _switch(MEMORY, "copy-client-shm", False, "copy the content of registered shared memory in the gateway; false: "
            "workers map it"),
    _file(ACCESS, "tls-cert", "enable TLS on all endpoints, with this certificate chain (PEM)"),
    _file(ACCESS, "tls-key", "private key of --tls-cert, if not in the same file"),
    _file(ACCESS, "tls-client-ca", "require client certificates signed by one of these CAs"),
    _switch(ACCESS, "grpc-use-ssl", False, "enable TLS for gRPC with separate certificates"),
    _file(ACCESS, "grpc-server-cert", "certificate for gRPC"),
    _file(ACCESS, "grpc-server-key", "private key for gRPC"),
    _switch(ACCESS, "grpc-use-ssl-mutual", False, "require client certificates for gRPC"),
    _file(ACCESS, "grpc-root-cert", "CA certificates for verifying the gRPC client certificates"),
    _file(ACCESS, "tokens-file", "tokens and their roles; reread on SIGHUP, as are certificates"),
    _text(ZMQ, "zmq-address", "URL", "listener for ZeroMQ over TCP, e.g. tcp://127.0.0.1:8790; needs the two key files",
          shown="none"),
    _file(ZMQ, "zmq-server-key", "server key NAME.key, from `shmserve keygen`"),
    _file(ZMQ, "zmq-keys", "client keys and their roles: lines of PUBLIC-KEY ROLE,ROLE NAME; reloaded on change"),
    _size(ZMQ, "zmq-max-input-size", 64 << 20, "maximum size of the inputs of a ZeroMQ request", serve=False),
)  # fmt: skip
