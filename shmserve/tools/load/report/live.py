"""One line about the running load, refreshed in place; nothing if the output is not a terminal."""

from __future__ import annotations

from types import TracebackType

from shmserve.terminal.console import Screen
from shmserve.terminal.tables import duration_text
from shmserve.tools.load.measure import Progress
from shmserve.tools.load.plan import SECOND
from shmserve.tools.load.report.table import rate_text


def line(progress: Progress) -> str:
    """The important parts come first, because a narrow terminal cuts off the end."""
    of = f"/{progress.loads}" if progress.loads else ""
    parts = [f"[{progress.number}{of}]", str(progress.load), f"{rate_text(progress.per_s)} requests/s"]
    if progress.p50_ns:
        parts.append(f"p50 {duration_text(progress.p50_ns / SECOND)}, p99 {duration_text(progress.p99_ns / SECOND)}")
    if progress.failed:
        parts.append(f"{progress.failed:,} failed")
    return "  ".join([*parts, f"{progress.phase}, {progress.seconds:.0f} s"])


class Live:
    """Shows the progress within a `with` block, and removes it at the end."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._live: object = None

    def __enter__(self) -> Live:
        if self._screen.is_terminal:
            from rich.live import Live as Display

            self._display = Display(console=self._screen.console(), auto_refresh=False, transient=True)
            self._display.start()
            self._live = self._display
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._display.stop()

    def show(self, progress: Progress) -> None:
        self.say(line(progress))

    def say(self, text: str) -> None:
        if self._live is not None:
            from rich.text import Text

            self._display.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
