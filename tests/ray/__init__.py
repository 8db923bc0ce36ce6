"""Tests of shmserve.ray. Those that need Ray are skipped without it; `make test-fleet` installs it."""
