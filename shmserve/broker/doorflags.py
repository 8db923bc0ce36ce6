"""The flags of `shmserve serve` about its doors to the network: most are passed on to the gateways as they are.

The rule of the file: what a value means is the gateway's to say; here is only that there is one.
"""

from __future__ import annotations

from typing import Any

from shmserve.broker.flag import Flag

DOORS = "Doors to the network"


def _told(
    name: str,
    metavar: str,
    help_: str,
    shown: str = "",
    *,
    kind: str = "text",
    triton: str = "",
    compatible: Any = None,
) -> Flag:
    """One that gateways have under the same name."""
    return Flag(
        name, kind, DOORS, help_, None, metavar, shown=shown, triton=triton, gateway=name, compatible=compatible
    )


def _switch(name: str, help_: str, shown: str, gateway: str = "") -> Flag:
    return Flag(name, "boolean", DOORS, help_, None, shown=shown, gateway=gateway or name)


def _number(name: str, metavar: str, help_: str, shown: str, compatible: Any = None) -> Flag:
    return _told(name, metavar, help_, shown, kind="whole", compatible=compatible)


def _file(name: str, help_: str) -> Flag:
    return _told(name, "FILE", help_, kind="path")


def _each(name: str, metavar: str, help_: str) -> Flag:
    return Flag(name, "text", DOORS, f"{help_}; may be given several times", [], metavar, repeatable=True, gateway=name)


def _share(kind: str, whose: str) -> Flag:
    return _told(f"{kind}-share", "FRACTION", f"of a gateway's allowance of calls and memory for inputs, what one "
                 f"{whose} may have in flight, of what the others leave; 1: all of it", "0.25")  # fmt: skip


_ROLES = "all of them for every caller; loading models and changing settings must be allowed"
_LOCAL = "0.0.0.0; only this machine, unless it is asked for"

DOOR_FLAGS = (
    Flag("no-gateway", "boolean", DOORS, "no doors to the network: no HTTP, no gRPC, no metrics on a port; a gateway "
         "that runs by itself may still serve", False),
    Flag("gateways", "whole", DOORS, "so many processes share the ports; the kernel spreads callers over them", 1, "N",
         least=1),
    _switch("allow-http", "a door for HTTP", "true"),
    _number("http-port", "N", "its port; 0: any", "8000"),
    _told("http-address", "ADDRESS", "where it is listened for", "127.0.0.1", triton=_LOCAL, compatible="0.0.0.0"),
    _told("http-roles", "ROLE,ROLE", "what callers of HTTP may do, of infer, observe and operate; with --tokens-file "
          "those without a token may do nothing, unless it is said here", "infer,observe", triton=_ROLES,
          compatible="infer,observe,operate"),
    _number("http-max-input-size", "N", "bytes of a body", "67108864"),
    _number("http-max-json-size", "N", "bytes of the JSON in a request to a model; 0: as --http-max-input-size",
            "16777216", compatible=0),
    _switch("reuse-http-port", "other servers may listen on the same ports", "false", "reuse-port"),
    _each("http-restricted-api", "API,API:HEADER=VALUE", "these APIs want this header"),
    _told("http-header-forward-pattern", "REGEX", "headers with such names go on to the model, as parameters"),
    _switch("allow-grpc", "a door for gRPC", "true"),
    _number("grpc-port", "N", "its port; 0: any", "8001"),
    _told("grpc-address", "ADDRESS", "where it is listened for", "127.0.0.1", triton=_LOCAL, compatible="0.0.0.0"),
    _told("grpc-roles", "ROLE,ROLE", "what callers of gRPC may do", "as --http-roles"),
    _number("grpc-max-input-size", "N", "bytes of a message", "67108864", compatible=2**31 - 1),
    _switch("reuse-grpc-port", "the same as --reuse-http-port", "false", "reuse-port"),
    _each("grpc-restricted-protocol", "API,API:KEY=VALUE", "these APIs want the header triton-grpc-protocol-KEY"),
    _told("grpc-header-forward-pattern", "REGEX", "the same as --http-header-forward-pattern, for gRPC"),
    _told("grpc-infer-response-compression-level", "LEVEL", "none, low, medium or high", "none"),
    _number("grpc-keepalive-time", "MS", "after so long without news a caller is asked whether he is there", "7200000"),
    _number("grpc-keepalive-timeout", "MS", "so long he has to answer", "20000"),
    _switch("grpc-keepalive-permit-without-calls", "he is asked, and may ask, without calls in flight, too", "false"),
    _number("grpc-http2-min-recv-ping-interval-without-data", "MS", "callers that ask more often are sent away",
            "300000"),
    _number("grpc-http2-max-ping-strikes", "N", "after doing so this often", "2"),
    _number("grpc-max-connection-age", "MS", "a connection that is so old is ended; 0: none is", "0"),
    _number("grpc-max-connection-age-grace", "MS", "so long its calls may go on; 0: without a limit", "0"),
    _switch("allow-metrics", "a door for Prometheus", "true"),
    _number("metrics-port", "N", "its port; 0: any", "8002"),
    _told("metrics-address", "ADDRESS", "where it is listened for", "as --http-address"),
    _share("connection", "connection"),
    _share("address", "address; behind a reverse proxy all callers have one"),
    _share("token", "token, or key of ZeroMQ"),
    _switch("allow-client-shm", "callers may register shared memory of this machine", "false"),
    _switch("copy-client-shm", "the gateway copies what is in it; otherwise workers map it", "false"),
    _file("tls-cert", "TLS at all doors with this certificate, and those up to the root (PEM)"),
    _file("tls-key", "its private key, where it is not in the same file"),
    _file("tls-client-ca", "callers need a certificate that one of these has signed"),
    _switch("grpc-use-ssl", "TLS of its own for gRPC", "false"),
    _file("grpc-server-cert", "its certificate"),
    _file("grpc-server-key", "its private key"),
    _switch("grpc-use-ssl-mutual", "callers of gRPC need a certificate, too", "false"),
    _file("grpc-root-cert", "who has to have signed it"),
    _file("tokens-file", "who has a token, and his roles; read again at SIGHUP, as are certificates"),
    _told("zmq-address", "URL", "where ZeroMQ over tcp is listened for, as tcp://127.0.0.1:8790; needs the two files "
          "of keys", "nowhere"),
    _file("zmq-server-key", "its NAME.key, from `shmserve keygen`"),
    _file("zmq-keys", "who is let in there: lines of PUBLIC-KEY ROLE,ROLE NAME"),
    Flag("gateway-args", "text", DOORS, "more options of `shmserve gateway`, in one: "
         "--gateway-args='--http-idle-timeout 60'", None, "WORDS"),
)  # fmt: skip
