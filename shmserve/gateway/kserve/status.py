"""Server errors -> status codes and texts of HTTP and gRPC. Invariant: the table covers every code of the error tree.

Errors of the gateway's own connection to the broker (paths, addresses) are not disclosed to clients.
"""

from __future__ import annotations

from shmserve.errors import ConnectionLost, ServeError

STATUSES = {
    "INVALID_ARG": (400, "INVALID_ARGUMENT"),
    "PROTOCOL": (400, "INVALID_ARGUMENT"),
    "NOT_FOUND": (404, "NOT_FOUND"),
    "ALREADY_EXISTS": (400, "ALREADY_EXISTS"),
    "UNSUPPORTED": (501, "UNIMPLEMENTED"),
    "UNAUTHENTICATED": (401, "UNAUTHENTICATED"),
    "DENIED": (403, "PERMISSION_DENIED"),
    "UNAVAILABLE": (503, "UNAVAILABLE"),
    "QUEUE_TIMEOUT": (503, "UNAVAILABLE"),
    "CONNECTION_LOST": (503, "UNAVAILABLE"),
    "DEADLINE_EXCEEDED": (504, "DEADLINE_EXCEEDED"),
    "CANCELLED": (400, "CANCELLED"),
    "HANDLE_LOST": (500, "INTERNAL"),
    "MODEL_FAILED": (500, "INTERNAL"),
    "INTERNAL": (500, "INTERNAL"),
    "UNKNOWN": (400, "UNKNOWN"),
}
"""Code of an error -> HTTP status, gRPC status."""
UNREACHABLE = "the server behind this gateway is unreachable, or ended before it responded"
DECOUPLED = "has a decoupled transaction policy"
NO_DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"
NO_DECOUPLED_RPC = "ModelInfer RPC doesn't support models with decoupled transaction policy"
NO_OUTPUT = "unexpected inference output"
"""The only invalid request that Triton reports without its id."""
REASONS = {
    200: "OK",
    304: "Not Modified",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    417: "Expectation Failed",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
    504: "Gateway Timeout",
    505: "HTTP Version Not Supported",
}


def http_of(error: ServeError) -> int:
    return STATUSES[error.code][0]


def grpc_of(error: ServeError) -> str:
    return STATUSES[error.code][1]


def encodable(text: str) -> str:
    """The text without lone surrogates, which it has if it quotes the client."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def text_of(error: ServeError, request_id: str = "") -> str:
    """The text for a client. If an invalid request has an id, the text begins with it."""
    if isinstance(error, ConnectionLost):
        return UNREACHABLE
    text = str(error)
    if request_id and error.code == "INVALID_ARG" and not text.startswith(NO_OUTPUT):
        return f"[request id: {request_id}] {text}"
    return text


def http_text_of(error: ServeError, request_id: str) -> str:
    """The same for HTTP, which can send only one response."""
    text = text_of(error, request_id)
    return f"{NO_DECOUPLED}: {text}" if error.code == "UNSUPPORTED" and DECOUPLED in text else text


def grpc_text_of(error: ServeError, request_id: str = "") -> str:
    """The same for a unary gRPC call. ModelStreamInfer supports decoupled models and uses `text_of`."""
    text = text_of(error, request_id)
    return f"{NO_DECOUPLED_RPC}: {text}" if error.code == "UNSUPPORTED" and DECOUPLED in text else text
