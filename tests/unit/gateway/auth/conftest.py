"""Files of tokens and certificates."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from tests.support.gateway.credentials import digest


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"a infer {digest('x')}\n")
    return path


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(authority: trustme.CA, tmp_path: Path) -> dict[str, str]:
    issued = authority.issue_cert("localhost")
    issued.private_key_pem.write_to_path(str(tmp_path / "key"))
    (tmp_path / "key").chmod(0o600)
    issued.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "both"))
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "cert"))
    authority.issue_cert("localhost").private_key_pem.write_to_path(str(tmp_path / "other"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca"))
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    pem, kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (tmp_path / "locked").write_bytes(key.private_bytes(pem, kind, serialization.BestAvailableEncryption(b"x")))
    (tmp_path / "noise").write_bytes(b"noise")
    return {path.name: str(path) for path in tmp_path.iterdir()} | {"none": str(tmp_path / "none")}
