"""The load generator wrk: a number of connections, each with one request in flight."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SLOWEST_S = 30
"""wrk counts a slower response as a failure. Its default of 2 s is too short for a busy machine."""
SCRIPT = """
wrk.method = "POST"
{headers}
local bodies = {{}}
for number = 1, {count} do
  local file = io.open("{body}" .. number, "rb")
  bodies[number] = file:read("*a")
  file:close()
end
wrk.body = bodies[1]
if {count} > 1 then
  local turn = 0
  request = function()
    turn = turn % {count} + 1
    return wrk.format(nil, nil, nil, bodies[turn])
  end
end
done = function(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format('RESULT {{"count": %d, "us": %d, "p50": %d, "p99": %d, "failed": %d}}\\n', summary.requests,
    summary.duration, latency:percentile(50), latency:percentile(99),
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
"""


@dataclass(frozen=True)
class WrkTurn:
    per_s: float
    p50_us: float
    p99_us: float


@dataclass(frozen=True)
class Post:
    """Requests that are sent repeatedly, in turn."""

    url: str
    headers: Mapping[str, str]
    bodies: tuple[bytes, ...]


def run(tool: str, post: Post, connections: int, seconds: float, work: Path) -> WrkTurn:
    body, script = work / "wrk.body", work / "wrk.lua"
    for number, content in enumerate(post.bodies, 1):
        body.with_name(f"{body.name}{number}").write_bytes(content)
    headers = "\n".join(f'wrk.headers["{name}"] = "{value}"' for name, value in post.headers.items())
    script.write_text(SCRIPT.format(headers=headers, body=body, count=len(post.bodies)))
    options = ["-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", f"{SLOWEST_S}s"]
    command = [tool, *options, "-s", str(script), post.url]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = re.search(r"^RESULT (.*)$", output, re.MULTILINE)
    if line is None:
        raise RuntimeError(f"wrk printed no result: {output[-300:]}")
    result = json.loads(line[1])
    if result["failed"]:
        raise RuntimeError(f"wrk: {result['failed']} of {result['count']} requests failed")
    return WrkTurn(result["count"] * 1e6 / result["us"], result["p50"], result["p99"])
