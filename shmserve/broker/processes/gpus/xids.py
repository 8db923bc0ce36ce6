"""Xids: the numbers by which NVIDIA's driver reports errors of a GPU.

Source: NVIDIA's Xid catalog (https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html). An Xid takes the
GPU out of service if the catalog's immediate action is a reset of the GPU or a reboot. Exceptions: 74, 136 and 155
concern NVLink, which an instance does not use, and all neighbours of a broken GPU report 74; after 109, which a model
can cause, the driver's recovery action decides. All other Xids affect at most the process that caused them.
"""

from __future__ import annotations

from collections.abc import Iterable

from shmserve.repo.gpu_state import REBOOT, RESET

RECOVERY_ACTION_CHANGED = 154
"""The recovery action that the driver recommends has changed."""
FIXES = {
    46: RESET,
    48: RESET,
    62: RESET,
    64: RESET,
    79: REBOOT,
    95: RESET,
    110: RESET,
    119: RESET,
    120: RESET,
    140: RESET,
    143: RESET,
    156: RESET,
    158: RESET,
}
"""Xids that take a GPU out of service, and what an operator has to do."""
NAMES = {
    8: "GPU stopped processing",
    13: "graphics engine exception",
    31: "GPU memory page fault",
    32: "invalid or corrupted push buffer stream",
    39: "copy engine exception",
    43: "GPU stopped processing",
    45: "preemptive cleanup, due to previous errors",
    46: "GPU stopped processing",
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    63: "GPU memory remapping event",
    64: "GPU memory remapping failure",
    68: "NVDEC0 exception",
    69: "graphics engine class error",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high single-bit ECC error rate",
    94: "contained memory error",
    95: "uncontained memory error",
    109: "context switch timeout",
    110: "security fault",
    119: "GSP RPC timeout",
    120: "GSP error",
    136: "NVLink training failed",
    137: "NVLink privilege error",
    140: "unrecovered ECC error",
    143: "GPU initialization error",
    154: "GPU recovery action changed",
    155: "NVLink error defined by software",
    156: "resource retirement event",
    157: "resource retirement failure",
    158: "GPU fatal timeout",
}
FATAL, IGNORE = "fatal", "ignore"


def title(xid: int) -> str:
    """`Xid 79 (GPU has fallen off the bus)`"""
    return f"Xid {xid} ({NAMES[xid]})" if xid in NAMES else f"Xid {xid}"


def rule(text: str) -> tuple[int, str]:
    """Parses `74=fatal` or `119=ignore`. Raises ValueError."""
    number, _, what = text.partition("=")
    if not (number.isascii() and number.isdecimal() and len(number) < 6) or what not in (FATAL, IGNORE):
        raise ValueError(f"found '{text}', expected NUMBER={FATAL} or NUMBER={IGNORE}, as in 74={FATAL}")
    return int(number), what


def fixes(rules: Iterable[tuple[int, str]]) -> dict[int, str]:
    """`FIXES`, changed by these rules. The last rule for an Xid applies."""
    result = dict(FIXES)
    for number, what in rules:
        if what == FATAL:
            result.setdefault(number, RESET)
        else:
            result.pop(number, None)
    return result
