"""One server for all tests of a pytest worker that need only their own models, not their own server.

It runs in explicit mode, with a gateway. Each module, or test, adds its models for as long as it runs. A test that
stops or kills the server, that needs other options, or that counts what a whole server does, starts its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shmserve.testing import Server


class SharedServer(Server):
    """`root` is its repository. A test that writes models there itself loads them, and unloads them at its end."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "--model-control-mode", "explicit", gateway=True)
        self.root = root

    def __enter__(self) -> SharedServer:
        super().__enter__()
        return self

    @contextmanager
    def serving(self, models: Path, *names: str) -> Iterator[SharedServer]:
        """Serves the models of a folder, or those of them with these names."""
        chosen = (
            [models / name for name in names] if names else sorted(path for path in models.iterdir() if path.is_dir())
        )
        with self.client() as client:
            links = [self.root / path.name for path in chosen]
            try:
                for link, path in zip(links, chosen, strict=True):
                    link.symlink_to(path)
                for link in links:
                    client.load(link.name)
                yield self
            finally:
                for link in reversed(links):  # an ensemble after its steps
                    client.unload(link.name)
                    link.unlink()
