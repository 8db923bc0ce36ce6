"""Certificates -> the TLS context of an endpoint, for TLS 1.2 and later. Invariant: an error names the file and its
flag."""

from __future__ import annotations

import os
import ssl
import stat
from typing import NamedTuple


class BadCertificate(Exception):
    """The files cannot be used."""


class FlagFile(NamedTuple):
    """A file, and the flag that it was given with."""

    path: str
    flag: str

    def __str__(self) -> str:
        return f"{self.flag} {self.path}"


class Files(NamedTuple):
    """`key`: the private key, unless the certificate file contains it. `client_ca`: clients need a certificate signed
    by one of these CAs."""

    certificate: FlagFile
    key: FlagFile | None = None
    client_ca: FlagFile | None = None


def context(files: Files, alpn: str) -> ssl.SSLContext:
    """`alpn`: the only protocol offered, http/1.1 or h2."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.minimum_version = ssl.TLSVersion.TLSv1_2
    tls.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    tls.set_alpn_protocols([alpn])
    for file in files:
        if file is not None:
            _readable(file)
    key = files.key or files.certificate
    _load_authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files.certificate)  # for its more precise error
    try:
        tls.load_cert_chain(files.certificate.path, key.path, password=_no_password)
    except _Encrypted:
        raise BadCertificate(
            f"{key}: the private key is encrypted; decrypt it, as no password can be entered"
        ) from None
    except (ssl.SSLError, ValueError) as error:
        raise BadCertificate(f"{key}: {_reason(error, 'no readable private key in it')}") from None
    if files.client_ca is not None:
        _load_authorities(tls, files.client_ca)
        tls.verify_mode = ssl.CERT_REQUIRED
    return tls


def exposed(files: Files) -> str | None:
    """The warning for a private key that other users can access."""
    key = files.key or files.certificate
    mode = os.stat(key.path).st_mode
    if mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        return f"{key}: the private key is accessible to other users: chmod 600"
    return None


def _load_authorities(context: ssl.SSLContext, source: FlagFile) -> None:
    try:
        context.load_verify_locations(source.path)
    except (ssl.SSLError, ValueError) as error:
        raise BadCertificate(f"{source}: {_reason(error, 'no certificate in it')}") from None


class _Encrypted(Exception):
    """OpenSSL asked for the password of the key."""


def _no_password() -> str:
    raise _Encrypted


def _readable(source: FlagFile) -> None:
    try:
        with open(source.path, "rb"):
            pass
    except OSError as error:
        raise BadCertificate(f"{source}: {error.strerror or error}") from error


_REASONS = {
    "KEY_VALUES_MISMATCH": "the private key does not match the certificate",
    "NO_CERTIFICATE_OR_CRL_FOUND": "no certificate in it",
}


def _reason(error: Exception, otherwise: str) -> str:
    name = getattr(error, "reason", None)
    return _REASONS.get(name, name.lower().replace("_", " ")) if isinstance(name, str) else otherwise
