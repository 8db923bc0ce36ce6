"""The flags of `shmserve serve` for network endpoints. Most are passed on to the gateways unchanged.

Invariant: only the gateway interprets their values.
"""

from __future__ import annotations

from typing import Any

from shmserve.broker.config.flag import Flag

ENDPOINTS = "Network endpoints"


def _flag(
    name: str,
    metavar: str,
    help_: str,
    shown: str = "",
    *,
    kind: str = "text",
    triton: str = "",
    compatible: Any = None,
) -> Flag:
    """A flag with the same name in the gateway."""
    return Flag(
        name, kind, ENDPOINTS, help_, None, metavar, shown=shown, triton=triton, gateway=name, compatible=compatible
    )


def _switch(name: str, help_: str, shown: str, gateway: str = "") -> Flag:
    return Flag(name, "boolean", ENDPOINTS, help_, None, shown=shown, gateway=gateway or name)


def _number(name: str, metavar: str, help_: str, shown: str, compatible: Any = None) -> Flag:
    return _flag(name, metavar, help_, shown, kind="whole", compatible=compatible)


def _file(name: str, help_: str) -> Flag:
    return _flag(name, "FILE", help_, kind="path")


def _each(name: str, metavar: str, help_: str) -> Flag:
    return Flag(
        name, "text", ENDPOINTS, f"{help_}; may be given several times", [], metavar, repeatable=True, gateway=name
    )


def _share(kind: str, whose: str) -> Flag:
    return _flag(f"{kind}-share", "FRACTION", f"how much of a gateway's calls and input memory one {whose} may have in "
                 "flight, as a fraction of what the others leave; 1: no limit", "0.25")  # fmt: skip


_ROLES = "all roles for every caller; here loading models and changing settings must be granted"
_LOCAL = "0.0.0.0; here the server accepts only local connections by default"

GATEWAY_FLAGS = (
    Flag("no-gateway", "boolean", ENDPOINTS, "start no gateway: no HTTP, gRPC or metrics ports; a gateway that is "
         "started separately can still serve", False),
    Flag("gateways", "whole", ENDPOINTS, "number of gateway processes that share the ports; the kernel distributes "
         "connections", 1, "N", least=1),
    _switch("allow-http", "enable the HTTP endpoint", "true"),
    _number("http-port", "N", "HTTP port; 0: any free port", "8000"),
    _flag("http-address", "ADDRESS", "address of the HTTP listener", "127.0.0.1", triton=_LOCAL, compatible="0.0.0.0"),
    _flag("http-roles", "ROLE,ROLE", "roles of HTTP callers, of infer, observe and operate; with --tokens-file, "
          "callers without a token have no role unless this flag is set", "infer,observe", triton=_ROLES,
          compatible="infer,observe,operate"),
    _number("http-max-input-size", "N", "maximum bytes of a request body", "67108864"),
    _number("http-max-json-size", "N", "maximum bytes of JSON in a request to a model; 0: as --http-max-input-size",
            "16777216", compatible=0),
    _switch("reuse-http-port", "allow other servers to listen on the same ports", "false", "reuse-port"),
    _each("http-restricted-api", "API,API:HEADER=VALUE", "require this header for these APIs"),
    _flag("http-header-forward-pattern", "REGEX", "pass matching headers to the model as request parameters"),
    _switch("allow-grpc", "enable the gRPC endpoint", "true"),
    _number("grpc-port", "N", "gRPC port; 0: any free port", "8001"),
    _flag("grpc-address", "ADDRESS", "address of the gRPC listener", "127.0.0.1", triton=_LOCAL, compatible="0.0.0.0"),
    _flag("grpc-roles", "ROLE,ROLE", "roles of gRPC callers", "as --http-roles"),
    _number("grpc-max-input-size", "N", "maximum bytes of a message", "67108864", compatible=2**31 - 1),
    _switch("reuse-grpc-port", "same as --reuse-http-port", "false", "reuse-port"),
    _each("grpc-restricted-protocol", "API,API:KEY=VALUE", "require the header triton-grpc-protocol-KEY for these "
          "APIs"),
    _flag("grpc-header-forward-pattern", "REGEX", "same as --http-header-forward-pattern, for gRPC"),
    _flag("grpc-infer-response-compression-level", "LEVEL", "compression of responses: none, low, medium or high",
          "none"),
    _number("grpc-keepalive-time", "MS", "idle time before a keepalive ping is sent", "7200000"),
    _number("grpc-keepalive-timeout", "MS", "time to wait for the answer to a keepalive ping", "20000"),
    _switch("grpc-keepalive-permit-without-calls", "send and accept keepalive pings without calls in flight", "false"),
    _number("grpc-http2-min-recv-ping-interval-without-data", "MS",
            "minimum interval between pings of a client without data; a shorter one is a strike", "300000"),
    _number("grpc-http2-max-ping-strikes", "N", "number of strikes tolerated before the connection is closed", "2"),
    _number("grpc-max-connection-age", "MS", "maximum age of a connection; 0: no limit", "0"),
    _number("grpc-max-connection-age-grace", "MS", "time for its calls to finish after that; 0: no limit", "0"),
    _switch("allow-metrics", "enable the Prometheus endpoint", "true"),
    _number("metrics-port", "N", "Prometheus port; 0: any free port", "8002"),
    _flag("metrics-address", "ADDRESS", "address of the Prometheus listener", "as --http-address"),
    _share("connection", "connection"),
    _share("address", "address (behind a reverse proxy, all callers share one)"),
    _share("token", "token or ZeroMQ key"),
    _switch("allow-client-shm", "allow callers to register shared memory of this machine", "false"),
    _switch("copy-client-shm", "copy the content of registered shared memory in the gateway; false: workers map it",
            "false"),
    _file("tls-cert", "enable TLS on all endpoints, with this certificate chain (PEM)"),
    _file("tls-key", "private key of --tls-cert, if not in the same file"),
    _file("tls-client-ca", "require client certificates signed by one of these CAs"),
    _switch("grpc-use-ssl", "enable TLS for gRPC with separate certificates", "false"),
    _file("grpc-server-cert", "certificate for gRPC"),
    _file("grpc-server-key", "private key for gRPC"),
    _switch("grpc-use-ssl-mutual", "require client certificates for gRPC", "false"),
    _file("grpc-root-cert", "CA certificates that must have signed them"),
    _file("tokens-file", "tokens and their roles; reread on SIGHUP, as are certificates"),
    _flag("zmq-address", "URL", "listener for ZeroMQ over TCP, e.g. tcp://127.0.0.1:8790; needs the two key files",
          "none"),
    _file("zmq-server-key", "server key NAME.key, from `shmserve keygen`"),
    _file("zmq-keys", "client keys and their roles: lines of PUBLIC-KEY ROLE,ROLE NAME"),
    Flag("gateway-args", "text", ENDPOINTS, "further options of `shmserve gateway`, as one string: "
         "--gateway-args='--http-idle-timeout 60'", None, "WORDS"),
)  # fmt: skip
