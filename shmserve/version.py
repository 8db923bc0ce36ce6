"""The installed version."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    try:
        return metadata.version("shmserve")
    except metadata.PackageNotFoundError:  # a checkout without an installation
        return "0+unknown"
