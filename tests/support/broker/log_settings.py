"""The settings that a server's command line gives its log."""

from __future__ import annotations

import argparse
from typing import Any


def log_settings(**given: Any) -> argparse.Namespace:
    known = {"log_verbose": 0, "log_info": True, "log_warning": True, "log_error": True, "triton_compatible": False}
    return argparse.Namespace(**known | {"log_format": "default", "log_file": None} | given)
