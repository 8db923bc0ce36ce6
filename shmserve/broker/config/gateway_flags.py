"""Flags of `shmserve serve` for network endpoints: gateway options, and the number of gateways."""

from __future__ import annotations

from shmserve.broker.config.flag import Flag
from shmserve.gateway_options import OPTIONS, Option

ENDPOINTS = "Network endpoints"
_KINDS = {"boolean": "boolean", "whole": "whole", "path": "path"}
"""Kinds of values that `serve` parses; all others are passed to the gateway as text."""


def _passed_on(option: Option) -> Flag:
    """The flag has no default, so that only options that were set are passed to gateways."""
    return Flag(
        option.name,
        _KINDS.get(option.kind, "text"),
        ENDPOINTS,
        f"{option.help}; may be given several times" if option.repeatable else option.help,
        [] if option.repeatable else None,
        "" if option.kind == "boolean" else option.metavar,
        option.repeatable,
        shown=option.default_text,
        triton=option.triton,
        gateway=option.sets or option.name,
        compatible=option.compatible,
    )


GATEWAY_FLAGS = (
    Flag("no-gateway", "boolean", ENDPOINTS, "start no gateway: no HTTP, gRPC or metrics ports; a gateway that is "
         "started separately can still serve", False),
    Flag("gateways", "whole", ENDPOINTS, "number of gateway processes that share the ports; the kernel distributes "
         "connections", 1, "N", least=1),
    *(_passed_on(option) for option in OPTIONS if option.serve),
    Flag("gateway-args", "text", ENDPOINTS, "further options of `shmserve gateway`, as one string: "
         "--gateway-args='--http-idle-timeout 60'", None, "WORDS"),
)  # fmt: skip
