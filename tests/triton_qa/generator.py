"""Runs one of the checkout's generators: `python generator.py SCRIPT ...`. They name a module of OpenVINO that current
releases have merged into the package.
"""

from __future__ import annotations

import runpy
import sys
from contextlib import suppress
from pathlib import Path


def main(words: list[str]) -> None:
    if "--openvino" in words:
        with suppress(ImportError):
            import openvino

            sys.modules["openvino.runtime"] = openvino
    sys.argv = words
    sys.path[0] = str(Path(words[0]).absolute().parent)
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
