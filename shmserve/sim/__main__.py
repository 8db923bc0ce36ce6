"""`python -m shmserve.sim`; all of it is in command.py."""

import sys

from shmserve.sim.command import main

sys.exit(main())
