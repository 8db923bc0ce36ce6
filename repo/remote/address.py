"""The address of a repository: SCHEME://PLACE/PATH.

Invariant: an address contains no secret. One with a password or a signature is refused, because addresses are on
command lines and in logs.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from shmserve.errors import InvalidRequest

PACKAGES = {
    "s3": ("s3fs",),
    "gs": ("gcsfs",),
    "as": ("adlfs",),
    "http": ("fsspec", "aiohttp"),
    "https": ("fsspec", "aiohttp"),
    "hf": ("fsspec", "huggingface_hub"),
}
"""Scheme -> the packages that it needs. The extra that installs them has the scheme's name."""
_ENDPOINT = re.compile(r"(https?://)?([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")
_PARTS = {"s3": 1, "gs": 1, "as": 2, "hf": 2, "http": 0, "https": 0}
"""How many parts a path has at least."""
_EXAMPLES = {
    "s3": "s3://BUCKET/PATH or s3://HOST:PORT/BUCKET/PATH",
    "gs": "gs://BUCKET/PATH",
    "as": "as://ACCOUNT/CONTAINER/PATH",
    "http": "http://HOST/PATH",
    "https": "https://HOST/PATH",
    "hf": "hf://OWNER/REPOSITORY[@REVISION]/PATH",
}


class RemoteAddress(NamedTuple):
    """`endpoint`: URL of the server, "" for the provider's own. `path`: without slashes at its ends."""

    scheme: str
    endpoint: str
    path: str

    def __str__(self) -> str:
        if self.scheme == "s3" and self.endpoint:
            place = self.endpoint.removeprefix("http://")
            return f"s3://{place}/{self.path}"
        if self.scheme in ("http", "https"):
            return f"{self.endpoint}/{self.path}".rstrip("/")
        return f"{self.scheme}://{self.path}"

    @property
    def extra(self) -> str:
        return "http" if self.scheme == "https" else self.scheme

    @property
    def key(self) -> str:
        """Name of its directories in the cache."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]


def is_remote(text: str) -> bool:
    return "://" in text


def parse_address(text: str) -> RemoteAddress:
    """Raises InvalidRequest, with a text that does not repeat what may be a secret."""
    scheme, separator, rest = text.partition("://")
    if scheme not in PACKAGES:
        known = ", ".join(f"{name}://" for name in PACKAGES)
        if not separator:
            raise InvalidRequest(
                f"the address of the model repository has no scheme; known are {known}, such as {_EXAMPLES['hf']}"
            )
        raise InvalidRequest(f"model repository '{scheme[:20]}://...': unknown scheme; known are {known}")
    shown = f"{scheme}://..."
    if not text.isprintable() or " " in text or "\\" in text:
        raise InvalidRequest(f"model repository {shown}: has spaces, backslashes or control characters")
    if "?" in rest or "#" in rest:
        raise InvalidRequest(
            f"model repository {shown}: has '?' or '#'. A signature or token in an address would be visible to all "
            "users of the machine; docs/remote.md describes where credentials are read from"
        )
    authority = rest.removeprefix("https://").removeprefix("http://").partition("/")[0]
    if "@" in authority and not (scheme == "hf" and ":" not in authority):
        raise InvalidRequest(
            f"model repository {shown}: has a user name or password, which would be visible to all users of the "
            "machine; put it into ~/.netrc (http) or the environment"
        )
    endpoint, path = _split(scheme, rest)
    parts = path.split("/") if path else []
    wrong = any(part in ("", ".", "..") for part in parts)
    if wrong or len(parts) < _PARTS[scheme] or (scheme in ("http", "https") and not _is_host(endpoint)):
        raise InvalidRequest(f"model repository {text}: expected {_EXAMPLES[scheme]}")
    return RemoteAddress(scheme, endpoint, path)


def _split(scheme: str, rest: str) -> tuple[str, str]:
    if scheme in ("http", "https"):
        place, _, path = rest.partition("/")
        return f"{scheme}://{place}", path.strip("/")
    if scheme == "s3" and (match := _ENDPOINT.match(rest)):
        # Like Triton, without encryption unless the address says https.
        return f"{match[1] or 'http://'}{match[2]}:{match[3]}", rest[match.end() :].strip("/")
    return "", rest.strip("/")


def _is_host(endpoint: str) -> bool:
    return re.fullmatch(r"https?://([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?", endpoint) is not None
