"""Entry point of `python -m shmserve.sim`; see command.py."""

import sys

from shmserve.sim.command import main

sys.exit(main())
