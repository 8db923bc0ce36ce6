"""The version of what is installed."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    try:
        return metadata.version("shmserve")
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return "0+unknown"
