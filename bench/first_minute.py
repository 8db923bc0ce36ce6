"""`python -m bench.first_minute`: from an empty folder to the first answer, and from a saved file to the new answer.

The first measurement makes an environment, installs a wheel of this checkout with pip, writes app.py, starts
`shmserve dev app.py`, and asks over HTTP. The second saves app.py RELOADS times while the server runs.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

APP = "import shmserve\n\n\n@shmserve.model\ndef say(x: int) -> str:\n    return f'{0} {{x}}'\n"
RELOADS = 5
FIRST_S, RELOAD_S = 60.0, 1.0
"""What the project promises."""
ROOT = Path(__file__).parents[1]


def ask(port: int, number: int) -> str:
    """The answer; "" while there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", "/v2/models/say/generate", json.dumps({"x": number}))
        return str(json.loads(connection.getresponse().read()).get("output", ""))
    except OSError:
        return ""
    finally:
        connection.close()


def until(port: int, expected: str) -> None:
    while ask(port, 1) != expected:
        pass


def main(port: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "venv", place / "env"], check=True)
        pip = [f"{place}/env/bin/pip", "install", "--quiet", "--disable-pip-version-check", f"{ROOT}[server]"]
        subprocess.run(pip, check=True, stderr=subprocess.DEVNULL)
        installed, cpu = time.monotonic() - began, sum(os.times()[2:4])
        app = place / "app.py"
        app.write_text(APP.format("first"))
        options = ["--http-port", str(port), "--allow-grpc", "false", "--allow-metrics", "false"]
        command = [f"{place}/env/bin/shmserve", "dev", str(app), "--runtime-dir", f"{place}/run", *options]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
            until(port, "first 1")
            first = time.monotonic() - began
            reloads = []
            for number in range(RELOADS):
                saved = time.monotonic()
                app.write_text(APP.format(number))
                until(port, f"{number} 1")
                reloads.append(time.monotonic() - saved)
            server.terminate()
    slowest = max(reloads)
    print(f"first answer after {first:.1f} s; at most {FIRST_S:g} s; pip took {installed:.1f} s ({cpu:.1f} s of CPU)")
    print(f"reloads: {', '.join(f'{one:.2f}' for one in reloads)} s; at most {RELOAD_S:g} s")
    return int(first > FIRST_S or slowest > RELOAD_S)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 18800))
