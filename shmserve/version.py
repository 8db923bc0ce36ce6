"""Versions of installed packages."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    return version_of("shmserve") or "0+unknown"  # a checkout without an installation


def version_of(package: str) -> str:
    """Empty if the package is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
