"""The test suite: `make test`, or `python -m tests [arguments of pytest]`.

`unit` and `process` mirror the packages: `unit` starts no server, `process` starts real ones. `conformance` tests every
implementation of an interface, `scenarios` holds the scheduler's tests as text, `stress` the tests that have a long
form (`make stress`). Fixtures, fakes and models that several tests use are in `support`.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
STANDINS = ROOT / "tests" / "standins"
