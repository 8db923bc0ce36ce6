"""Log settings that can be changed at run time, with Triton's names.

Invariant: a change is applied completely or not at all, and clients cannot change the target of the log.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shmserve.broker.observability.logs import FORMATS, log_record, set_up
from shmserve.broker.observability.recent_records import RecentRecords
from shmserve.errors import InvalidRequest, Unsupported
from shmserve.protocol.bodies import MALFORMED

MAX_VERBOSE = 2**31 - 1
_NAMES = ("log_file", "log_info", "log_warning", "log_error", "log_verbose_level", "log_format")


class LogSettings:
    """`log_batches` is called with whether to log each batch; `recent` continues to get the records."""

    def __init__(
        self, settings: argparse.Namespace, log_batches: Callable[[bool], None], recent: RecentRecords | None = None
    ) -> None:
        self._recent = recent
        self._settings = argparse.Namespace(**vars(settings))
        self._log_batches = log_batches

    def document(self) -> dict[str, Any]:
        """The settings in Triton's format. Omits the directory of the log file, which must not be disclosed."""
        now = self._settings
        return {
            "log_file": Path(now.log_file).name if now.log_file is not None else "",
            "log_info": now.log_info,
            "log_warning": now.log_warning,
            "log_error": now.log_error,
            "log_verbose_level": now.log_verbose,
            "log_format": now.log_format,
        }

    def change(self, body: bytes) -> dict[str, Any]:
        """`body`: the changed settings as JSON. Raises InvalidRequest and Unsupported."""
        changes = {}
        for name, value in decode_changes(body, "log", _NAMES).items():
            if value is not None:
                changes[name] = _checked(name, value)
        if "log_verbose_level" in changes:
            changes["log_verbose"] = changes.pop("log_verbose_level")
        wanted = argparse.Namespace(**vars(self._settings) | changes)
        if vars(wanted) != vars(self._settings):
            try:
                set_up(wanted, self._recent)
            except OSError as error:
                raise InvalidRequest(f"cannot reopen the log file: {error.strerror}") from None
            self._settings = wanted
            self._log_batches(wanted.log_verbose > 1)
            shown = ", ".join(f"{name} {value}" for name, value in changes.items())
            log_record("info", f"log settings changed: {shown}", changes)
        return self.document()


def decode_changes(body: bytes, what: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    """Setting -> new value, from the JSON object in `body`. Raises InvalidRequest for settings that are not in
    `known`."""
    try:
        changes = msgspec.json.decode(body or b"{}", type=dict[str, Any])
    except MALFORMED as error:
        raise InvalidRequest(f"settings of the {what} must be a JSON object: {error}") from None
    for name in changes:
        if name not in known:
            raise InvalidRequest(f"unknown setting '{name[:80]}' of the {what}; expected one of: {', '.join(known)}")
    return changes


def _checked(name: str, value: Any) -> Any:
    match name:
        case "log_file":
            raise Unsupported("log file location can not be updated through network protocol; --log-file names it")
        case "log_verbose_level":
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_VERBOSE:
                raise InvalidRequest(f"expect int32 for '{name}', from 0 on")
        case "log_format":
            if not isinstance(value, str):
                raise InvalidRequest(f"expect string for '{name}'")
            if value not in FORMATS:
                raise InvalidRequest(
                    f"invalid argument for log_format, got: {value[:80]}; expected one of {', '.join(FORMATS)}"
                )
        case _:
            if not isinstance(value, bool):
                raise InvalidRequest(f"expect boolean for '{name}'")
    return value
