"""Whether this machine moves memory to huge pages on request."""

from __future__ import annotations

import platform

from shmserve.system.huge_pages import SETTINGS


def supported() -> bool:
    major, minor, *_ = platform.release().split(".")
    setting = SETTINGS / "enabled"
    return (int(major), int(minor)) >= (6, 1) and setting.exists() and "[never]" not in setting.read_text()
