"""Certificates: the TLS context of an endpoint, and invalid files."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from shmserve.gateway.auth import tls
from shmserve.gateway.auth.tls import Files, FlagFile


def chosen(files: dict[str, str], cert: str, key: str | None, ca: str | None = None) -> Files:
    return Files(
        FlagFile(files[cert], "--c"),
        FlagFile(files[key], "--k") if key else None,
        FlagFile(files[ca], "--a") if ca else None,
    )


def test_the_context_of_certificates(files: dict[str, str]) -> None:
    separate = chosen(files, "cert", "key")
    context = tls.context(separate, "h2")
    assert (context.minimum_version, context.verify_mode) == (ssl.TLSVersion.TLSv1_2, ssl.CERT_NONE)
    assert tls.context(chosen(files, "both", None, "ca"), "h2").verify_mode == ssl.CERT_REQUIRED
    assert tls.exposed(separate) is None
    Path(files["key"]).chmod(0o644)
    assert "chmod 600" in (tls.exposed(separate) or "")


@pytest.mark.parametrize(("cert", "key", "ca", "flag", "text"), [
    ("none", "key", None, "--c", "No such file"),
    ("cert", "none", None, "--k", "No such file"),
    ("cert", "key", "none", "--a", "No such file"),
    ("noise", "key", None, "--c", "no certificate in it"),
    ("cert", "noise", None, "--k", "no readable private key"),
    ("cert", "locked", None, "--k", "encrypted"),  # without a prompt
    ("cert", "other", None, "--k", "does not match the certificate"),
    ("cert", None, None, "--c", "no readable private key"),
    ("cert", "key", "noise", "--a", "no certificate"),
])  # fmt: skip
def test_invalid_certificates_are_refused(
    files: dict[str, str], cert: str, key: str | None, ca: str | None, flag: str, text: str
) -> None:
    with pytest.raises(tls.BadCertificate, match=text) as caught:
        tls.context(chosen(files, cert, key, ca), "h2")
    assert flag in str(caught.value)
