"""Runs a page of the documentation as a reader would: block by block, in an empty folder.

- A file is written if the paragraph above its block begins with its name, or ends with it, and a colon.
- Each line of a shell block is run, except `pip install`. `shmserve serve` runs in the background until the page starts
  another one, or ends; `localhost:8000` stands for its HTTP endpoint, and so on.
- Each Python block is a separate program.
- A block `text` is the output of the previous block; `...` stands for anything, and white space does not count.
"""

from __future__ import annotations

import doctest
import os
import re
import select
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from shmserve.repo import samples
from shmserve.testing import ANY_PORTS
from tests import ROOT
from tests.support.commands import COMMAND
from tests.support.patience import PATIENCE_S

SAMPLES = "build/samples"
PORTS = {"http": "localhost:8000", "grpc": "localhost:8001", "metrics": "localhost:8002"}
RUN_S = 120
_BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"(?s)`([\w./-]+\.\w+)`.*:|.*\s`([\w./-]+\.\w+)`:")
"""A paragraph whose first or last words name the following file."""
RUN_OR_SHOWN = ("sh", "text")
"""Languages of blocks that are never files."""
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    """A fenced block of a page. `file` is the name above it, or ""."""

    language: str
    text: str
    file: str

    @property
    def lines(self) -> list[str]:
        """The commands of a shell block."""
        return [line for line in self.text.replace("\\\n", " ").splitlines() if line.strip()]


def blocks_of(page: str) -> list[Block]:
    found = []
    for match in _BLOCK.finditer(page + "\n"):
        file = "" if match["language"] in RUN_OR_SHOWN else _file_above(page[: match.start()])
        found.append(Block(match["language"], match["text"], file))
    return found


def _file_above(text: str) -> str:
    """The file that the paragraph at the end of a text names, or ""."""
    paragraph = text.rstrip("\n").rpartition("\n\n")[2]
    found = _FILE.fullmatch(paragraph)
    return found[1] or found[2] if found else ""


class PageRunner:
    """A folder, and the server that the commands of a page have started in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: dict[str, str] = {}
        self._printed = ""

    def __enter__(self) -> PageRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def serve_samples(self, options: str = "") -> None:
        """The state of a reader who has run `make serve`: the samples are in build/samples, and are served."""
        samples.build(self._folder / SAMPLES, lambda text: None)
        self.command(f"shmserve serve --model-repository {SAMPLES}{options}")

    def run(self, block: Block) -> None:
        """Runs a block, or compares it with the output of the previous one."""
        if block.file:
            path = self._folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.language == "sh":
            self._printed = "".join(self.command(line) for line in block.lines)
        elif block.language == "python":
            self._printed = self._output([sys.executable, "-c", self._with_ports(block.text)])
        elif block.language == "text":
            assert doctest.OutputChecker().check_output(block.text, self._printed, _FLAGS), (
                f"the page shows:\n{block.text}\nprinted was:\n{self._printed}"
            )

    def command(self, line: str) -> str:
        """Runs a line of a shell block. Returns what it prints."""
        words = shlex.split(line, comments=True)
        if words[:1] == ["shmserve"] and words[1] in ("serve", "dev", "tritonserver"):
            self._serve([word for word in words[1:] if word != "&"])
            return ""
        if words[:2] == ["pip", "install"]:  # the suite has installed what it needs
            return ""
        return self._output(["bash", "-euc", self._with_ports(line)])

    def _output(self, command: list[str]) -> str:
        done = subprocess.run(
            command,
            cwd=self._folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_S,
        )
        assert done.returncode == 0, f"{command[-1]}\nexit code {done.returncode}\n{done.stdout}{done.stderr}{self.log}"
        return done.stdout

    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SHMSERVE", "MAKE"))}
        return inherited | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "SHMSERVE_RUNTIME_DIR": str(self._folder / "run"),
            "ORT_DISABLE_TELEMETRY": "1",
            "COLUMNS": "120",
        }

    def _with_ports(self, text: str) -> str:
        for endpoint, address in self._ports.items():
            text = text.replace(PORTS.get(endpoint, endpoint), address)
        return text

    # ------------------------------------------------------------------------------------------- the server

    @property
    def log(self) -> str:
        path = self._folder / "server.log"
        return f"\nlog of the server:\n{path.read_text(errors='replace')}" if path.exists() else ""

    def _serve(self, words: list[str]) -> None:
        self._stop()
        reader, writer = os.pipe()
        try:
            command = [*COMMAND, *words, *ANY_PORTS, "--ready-fd", str(writer)]
            with (self._folder / "server.log").open("wb") as log:
                self._process = subprocess.Popen(
                    command,
                    cwd=self._folder,
                    env=self._environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[writer],
                )
            os.close(writer)
            writer = -1
            readable = select.select([reader], [], [], PATIENCE_S)[0]
            told = os.read(reader, 4096).decode().split() if readable else []
        finally:
            os.close(reader)
            if writer >= 0:
                os.close(writer)
        assert told[:1] == ["READY"], f"the server did not become ready{self.log}"
        self._ports = {name: f"localhost:{port}" for name, _, port in (word.partition("=") for word in told[1:])}

    def _stop(self) -> None:
        process, self._process, self._ports = self._process, None, {}
        if process is None:
            return
        process.terminate()
        try:
            code = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        assert code == 0, f"the server ended with code {code}{self.log}"
