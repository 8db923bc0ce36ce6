"""What every test of the suite has: the leak check, and pytester for the tests of the leak check itself."""

from __future__ import annotations

pytest_plugins = ("tests.leaks", "pytester")
