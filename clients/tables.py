"""Tables for the commands: shmserve.tables under the name that they know."""

from __future__ import annotations

from shmserve.tables import duration_text, plain_text, shape_text, table, value_text, values_text

__all__ = ["duration_text", "plain_text", "shape_text", "table", "value_text", "values_text"]
