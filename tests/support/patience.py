"""How long tests wait for what must happen."""

from __future__ import annotations

PATIENCE_S = 240.0
"""For a machine with ten times the processes that it has cores. Below pytest's timeout, whose report says less."""
CLUSTER_PATIENCE_S = 600.0
"""For clusters of servers and load balancers."""
