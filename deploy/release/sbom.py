"""`python -m deploy.release.sbom DIRECTORY`: the SBOM (CycloneDX, JSON) of the wheel in it, from an installation.

The wheel is installed with the extra `server` in a separate environment, so the SBOM has the versions that pip selects
today. The wheel itself contains no code of other projects. SHA256SUMS is rewritten.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from deploy.release.build import write_sums

EXTRA = "server"


def sbom(wheel: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, symlinks=True)
        pip = [sys.executable, "-m", "pip", "--python", folder, "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, f"{wheel}[{EXTRA}]"], check=True)
        command = [
            sys.executable,
            "-m",
            "cyclonedx_py",
            "environment",
            "--output-reproducible",
            "--short-PURLs",
            folder,
        ]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    text = json.dumps(about(json.loads(output), wheel), indent=2, sort_keys=True) + "\n"
    if (error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)) is not None:
        raise ValueError(f"not a valid CycloneDX document: {error}")
    return text


def about(document: dict[str, Any], wheel: Path) -> dict[str, Any]:
    """Sets the wheel as the document's subject, and removes the path from which it was installed."""
    name, version = wheel.name.split("-")[:2]
    (subject,) = (component for component in document["components"] if component["name"] == name)
    subject["purl"] = f"pkg:pypi/{name}@{version}"
    subject["hashes"] = [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
    subject.pop("externalReferences", None)
    document["metadata"]["component"] = subject
    document["components"].remove(subject)
    return document


def main(arguments: list[str]) -> int:
    target = Path(arguments[0] if arguments else "dist")
    (wheel,) = target.glob("*-any.whl")
    path = target / f"{'-'.join(wheel.name.split('-')[:2])}.cdx.json"
    path.write_text(sbom(wheel))
    write_sums(target)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
