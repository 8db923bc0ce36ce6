"""Credentials for stores, from the places where the providers' own tools look, and from Triton's credential file.

Invariant: no text of the server contains one. `Redactor` removes those that were read here, those of the environment,
and the query strings of URLs, which may be signed.
"""

from __future__ import annotations

import json
import netrc
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shmserve.errors import InvalidRequest
from shmserve.repo.remote.address import RemoteAddress

ENVIRONMENT = (
    "AWS_",
    "BOTO",
    "AZURE_",
    "GOOGLE_",
    "GCSFS_",
    "GCE_",
    "GCLOUD_",
    "CLOUDSDK_",
    "STORAGE_EMULATOR_HOST",
    "HF_",
    "HUGGING",
    "TRITON_CLOUD_CREDENTIAL_PATH",
    "NETRC",
    "SSL_",
    "REQUESTS_CA_",
    "CURL_CA_",
    "XDG_",
    *(name for word in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY") for name in (word, word.lower())),
)
"""Prefixes of environment variables for the process that mirrors repositories."""
FILE = "TRITON_CLOUD_CREDENTIAL_PATH"
_SECRET = re.compile(r"SECRET|TOKEN|PASSWORD|KEY|CREDENTIAL|CONNECTION_STRING|SAS|_PROXY", re.IGNORECASE)
_QUERY = re.compile(r"\?[^\s'\"<>)]*")
_PARTS = re.compile(r"(?:AccountKey|SharedAccessSignature)=([^;]+)")
"""The secrets in a connection string."""
_USER = re.compile(r"://[^\s/@'\"]+@")
_MIN_SECRET_LENGTH = 6
"""Shorter values are not removed from texts: they would be found in ordinary words."""
_MAX_TEXT_LENGTH = 400


class Redactor:
    """Removes secrets from texts."""

    def __init__(self) -> None:
        self._secrets: set[str] = set()
        self.add(value for name, value in os.environ.items() if _SECRET.search(name) and name.startswith(ENVIRONMENT))

    def add(self, values: Iterable[object]) -> None:
        for value in filter(None, map(str, filter(None, values))):
            parts = [value, *_PARTS.findall(value)]
            self._secrets |= {part for part in parts if len(part) >= _MIN_SECRET_LENGTH}

    def __call__(self, text: str) -> str:
        """The text without secrets, in one line of limited length."""
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        text = _USER.sub("://***@", _QUERY.sub("?***", text))
        text = " ".join(text.split())
        return text if len(text) <= _MAX_TEXT_LENGTH else text[:_MAX_TEXT_LENGTH] + "..."


def client_options(address: RemoteAddress, redact: Redactor) -> dict[str, Any]:
    """Options of the fsspec file system that contain credentials. Empty: its library finds them. Raises
    InvalidRequest.
    """
    entry = _of_file(address.extra, str(address))
    if address.scheme == "s3":
        return _s3(entry, redact)
    if address.scheme == "gs":
        return {"token": entry} if isinstance(entry, str) and entry else {}
    if address.scheme == "as":
        return _azure(address, entry, redact)
    if address.extra == "http":
        return _netrc(address, redact)
    return {}


def _of_file(section: str, address: str) -> Any:
    """The entry of Triton's credential file for the longest prefix of this address; None if there is none."""
    place = os.environ.get(FILE)
    if not place:
        return None
    try:
        document = json.loads(Path(place).read_bytes())
        entries = document.get(section, {})
        prefixes = [prefix for prefix in entries if _is_prefix(prefix, address)]
        return entries[max(prefixes, key=len)] if prefixes else None
    except (OSError, ValueError, AttributeError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a JSON file of Triton's form"
        raise InvalidRequest(f"the credential file ({FILE}) cannot be read: {why}") from None


def _is_prefix(prefix: str, address: str) -> bool:
    prefix = prefix.rstrip("/").lower()
    return not prefix or address.lower() == prefix or address.lower().startswith(f"{prefix}/")


def _s3(entry: Any, redact: Redactor) -> dict[str, Any]:
    settings: Mapping[str, Any] = entry if isinstance(entry, dict) else {}
    redact.add(settings.get(name) for name in ("secret_key", "key_id", "session_token"))
    options: dict[str, Any] = {}
    if settings.get("secret_key") and settings.get("key_id"):
        options |= {"key": settings["key_id"], "secret": settings["secret_key"]}
        options |= {"token": settings["session_token"]} if settings.get("session_token") else {}
    elif settings.get("profile"):
        options["profile"] = settings["profile"]
    if settings.get("region"):
        options["client_kwargs"] = {"region_name": settings["region"]}
    return options


def _azure(address: RemoteAddress, entry: Any, redact: Redactor) -> dict[str, Any]:
    settings: Mapping[str, Any] = entry if isinstance(entry, dict) else {}
    key = settings.get("account_key") or os.environ.get("AZURE_STORAGE_KEY")
    redact.add([key])
    options: dict[str, Any] = {"account_name": settings.get("account_str") or address.path.partition("/")[0]}
    if key:
        options["account_key"] = key
    else:
        options["anon"] = not any(name.startswith("AZURE_") for name in os.environ)
    return options


def _netrc(address: RemoteAddress, redact: Redactor) -> dict[str, Any]:
    """User and password for the host, from ~/.netrc or $NETRC."""
    place = Path(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))
    if not place.is_file():
        return {}
    try:
        login = netrc.netrc(str(place)).authenticators(urlsplit(address.endpoint).hostname or "")
    except (OSError, netrc.NetrcParseError):
        text = f"{place.name} cannot be read or parsed; the credentials for {address} may be there"
        raise InvalidRequest(text) from None
    if login is None:
        return {}
    redact.add([login[2]])
    return {"login": login[0], "password": login[2] or ""}
