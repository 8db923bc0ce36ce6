"""The Debian package: what dpkg installs, keeps and removes, in a directory in place of /."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.release import deb

pytestmark = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg is not installed")
INSTALLED = {
    "opt/shmserve/pyvenv.cfg": "version = 3.11.2\n",
    "opt/shmserve/bin/shmserve": "#!/opt/shmserve/bin/python\n",
    "usr/lib/systemd/system/shmserve.service": "[Service]\n",
    "usr/lib/sysusers.d/shmserve.conf": "",
    "usr/lib/tmpfiles.d/shmserve.conf": "",
    "etc/shmserve/shmserve.toml": "log-format = 'text'\n",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in INSTALLED.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return deb.build(tmp_path / "root", tmp_path / "dist")


def dpkg(place: Path, *words: str) -> None:
    (place / "var/lib/dpkg/updates").mkdir(parents=True, exist_ok=True)
    (place / "var/lib/dpkg/info").mkdir(exist_ok=True)
    for name in ("status", "available"):
        (place / "var/lib/dpkg" / name).touch()
    force = "--force-script-chrootless,depends,not-root,bad-path,confold"
    done = subprocess.run(["dpkg", f"--root={place}", force, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_fields(package: Path) -> None:
    done = subprocess.run(["dpkg-deb", "--field", str(package)], check=True, capture_output=True, text=True)
    fields = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    assert (fields["Package"], fields["Depends"]) == ("shmserve", "python3 (>= 3.11), python3 (<< 3.12), systemd")
    assert package.name == f"shmserve_{fields['Version']}_{fields['Architecture']}.deb"


def test_settings_survive_an_upgrade_and_a_removal(package: Path, tmp_path: Path) -> None:
    place = tmp_path / "machine"
    dpkg(place, "--install", str(package))
    assert (place / "usr/lib/systemd/system/shmserve.service").is_file()
    settings = place / "etc/shmserve/shmserve.toml"
    settings.write_text("mine")
    dpkg(place, "--install", str(package))
    compiled = place / "opt/shmserve/lib/__pycache__"
    compiled.mkdir(parents=True)
    dpkg(place, "--remove", "shmserve")
    assert settings.read_text() == "mine"
    assert not (place / "usr/lib/systemd/system/shmserve.service").exists()
    assert not compiled.exists()
    dpkg(place, "--purge", "shmserve")
    assert not settings.exists()
