"""`python -m deploy.release.deb ROOT DIRECTORY`: a Debian package of what `make install-systemd` has put below ROOT.

The package needs the minor version of Python that the environment was made with. Installing it starts nothing.
"""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

from deploy.release.build import ROOT

_CONTROL = """\
Package: shmserve
Version: {version}
Architecture: {architecture}
Maintainer: shmserve contributors
Installed-Size: {kilobytes}
Depends: python3 (>= {python}), python3 (<< {next_python}), systemd
Section: science
Priority: optional
Description: inference server
 Serves ONNX, PyTorch, Python and language models over HTTP and gRPC, with the API of Triton Inference Server. Tensors
 of local clients stay in shared memory.
"""
_POSTINST = """\
#!/bin/sh
set -e
systemd-sysusers --root="${DPKG_ROOT:-/}" shmserve.conf
systemd-tmpfiles --root="${DPKG_ROOT:-/}" --create shmserve.conf
if [ -z "$DPKG_ROOT" ] && [ -d /run/systemd/system ]; then
	systemctl daemon-reload
	systemctl try-restart shmserve.service shmserve-gateway.service
fi
"""
_PRERM = """\
#!/bin/sh
set -e
if [ "$1" = remove ] && [ -z "$DPKG_ROOT" ] && [ -d /run/systemd/system ]; then
	systemctl disable --now shmserve-gateway.service shmserve.service shmserve-mps.service
	systemctl stop shmserve.slice
fi
"""
_POSTRM = """\
#!/bin/sh
set -e
if [ "$1" = remove ] && [ -d "$DPKG_ROOT/opt/shmserve" ]; then
	find "$DPKG_ROOT/opt/shmserve" -name __pycache__ -prune -exec rm -rf {} +
fi
if [ "$1" = purge ]; then
	rm -rf "$DPKG_ROOT/var/lib/shmserve" "$DPKG_ROOT/var/cache/shmserve" "$DPKG_ROOT/var/log/shmserve-mps"
fi
if [ -z "$DPKG_ROOT" ] && [ -d /run/systemd/system ]; then
	systemctl daemon-reload
fi
"""


def build(root: Path, target: Path) -> Path:
    """Writes the package to the directory `target`. Adds the folder DEBIAN to `root`."""
    about = root / "DEBIAN"
    about.mkdir(exist_ok=True)
    version, architecture = _version(), _output("dpkg", "--print-architecture")
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink() and about not in path.parents]
    python = _python(root)
    control = _CONTROL.format(
        version=version,
        architecture=architecture,
        kilobytes=sum(path.stat().st_size for path in files) // 1024,
        python=f"3.{python}",
        next_python=f"3.{python + 1}",
    )
    (about / "control").write_text(control)
    settings = sorted(f"/{path.relative_to(root)}\n" for path in files if path.is_relative_to(root / "etc"))
    (about / "conffiles").write_text("".join(settings))
    for name, text in (("postinst", _POSTINST), ("prerm", _PRERM), ("postrm", _POSTRM)):
        (about / name).write_text(text)
        (about / name).chmod(0o755)
    target.mkdir(parents=True, exist_ok=True)
    package = target / f"shmserve_{version}_{architecture}.deb"
    _output("dpkg-deb", "-Zgzip", "--root-owner-group", "--build", str(root), str(package))
    return package


def _version() -> str:
    """That of setup.cfg; a release candidate is older than the release."""
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    return setup["metadata"]["version"].replace("rc", "~rc")


def _python(root: Path) -> int:
    """The minor version of the environment's Python."""
    text = (root / "opt/shmserve/pyvenv.cfg").read_text()
    match = re.search(r"^version = 3\.(\d+)\.", text, re.MULTILINE)
    if match is None:
        raise SystemExit(f"{root}/opt/shmserve is not an environment of Python 3")
    return int(match[1])


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    print(build(Path(sys.argv[1]), Path(sys.argv[2])))
