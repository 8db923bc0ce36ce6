"""Opens the connections of HTTP and gRPC targets, with TLS for https:// and grpcs://."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from shmserve.errors import ConnectionLost, InvalidRequest
from shmserve.tools.load.plan import GRPC, Endpoint

_PROTOCOLS = {GRPC: "h2"}
"""Protocol to request with ALPN; http/1.1 for all others."""
Connection = TypeVar("Connection", bound=asyncio.Protocol)
_FULL = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)
"""Errors when this machine has no descriptor or port for another connection."""
HANDSHAKE_S = 10.0
"""Maximum wait for a TLS handshake. A server without TLS may take the handshake for an incomplete request, and wait for
the rest."""
LOST = "the connection was lost"
"""Beginning of the error text when the peer closes the connection before it has answered."""
FOREIGN = "the server's response is not"
"""Beginning of the error text for a response in another protocol."""


@contextmanager
def explained(endpoint: Endpoint) -> Iterator[None]:
    """Wraps the first query on a connection: if the server closes the connection, the error says what the server may
    expect."""
    try:
        yield
    except ConnectionLost as error:
        text = str(error)
        if text.startswith(LOST) and endpoint.client_cert is None:
            raise ConnectionLost(f"{text}: the server at {endpoint.origin} may {_expected(endpoint)}") from error
        if text.startswith(FOREIGN):
            raise ConnectionLost(f"{text}: is {endpoint.authority} the port of another protocol?") from error
        raise


def _expected(endpoint: Endpoint) -> str:
    if endpoint.is_secure:
        return "want a certificate of the client (--client-cert)"
    if endpoint.kind == GRPC:
        return "expect TLS (grpcs://) or HTTP (http://)"
    return f"expect TLS ({endpoint.scheme}s://)"


def tls_of(endpoint: Endpoint) -> ssl.SSLContext | None:
    """The TLS settings of an endpoint, None without TLS. Raises InvalidRequest if a file cannot be used."""
    if not endpoint.is_secure:
        return None
    try:
        context = ssl.create_default_context(cafile=endpoint.ca)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read the authorities of --ca {endpoint.ca}: {_reason(error)}") from error
    context.set_alpn_protocols([_PROTOCOLS.get(endpoint.kind, "http/1.1")])
    if endpoint.client_cert is not None:
        try:
            context.load_cert_chain(endpoint.client_cert, endpoint.client_key, password=_refuse_password)
        except (OSError, ValueError) as error:
            files = " and ".join(filter(None, (endpoint.client_cert, endpoint.client_key)))
            raise InvalidRequest(
                f"cannot use {files} as certificate and key of the client: {_reason(error)}"
            ) from error
    return context


def _refuse_password() -> str:
    """Password callback. Without it, OpenSSL would prompt on the terminal, even in generator processes."""
    raise ValueError("the key is encrypted: give one without a password")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no PEM data").replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error)


async def connect(make: Callable[[], Connection], endpoint: Endpoint, tls: ssl.SSLContext | None) -> Connection:
    """Raises ConnectionLost if there is no server, or the TLS settings do not fit the server."""
    host, port = endpoint.address
    name, patience = (None, None) if tls is None else (host, HANDSHAKE_S)
    try:
        _, connection = await asyncio.get_running_loop().create_connection(
            make, host, port, ssl=tls, server_hostname=name, ssl_handshake_timeout=patience
        )
    except ssl.SSLCertVerificationError as error:
        text = f"the certificate of {endpoint.origin} is not valid ({error.verify_message})"
        raise ConnectionLost(f"{text}: give its authority by --ca, or the name in it by --url") from error
    except ssl.SSLError as error:
        text = f"no TLS connection to {endpoint.origin} ({error.reason or error})"
        raise ConnectionLost(f"{text}: does the server use TLS at this port?") from error
    except ConnectionAbortedError as error:
        text = f"no TLS connection to {endpoint.origin} (no handshake within {HANDSHAKE_S:g} s)"
        raise ConnectionLost(f"{text}: does the server use TLS at this port?") from error
    except OSError as error:
        if error.errno in _FULL:
            text = f"cannot open one more connection to {endpoint.origin} ({error.strerror})"
            raise ConnectionLost(f"{text}: use fewer callers, or raise the limit (ulimit -n)") from error
        text = f"no server at {endpoint.origin} ({error.strerror or error})"
        raise ConnectionLost(f"{text}: start one, or select another by --url") from error
    return connection


def close(transport: asyncio.Transport | None) -> None:
    """With TLS, aborts the connection: the event loop may not live long enough to wait for the peer's close_notify."""
    if transport is None:
        return
    if transport.get_extra_info("ssl_object") is not None:
        transport.abort()
    else:
        transport.close()
