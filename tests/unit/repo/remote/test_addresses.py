"""Addresses of remote repositories, credentials for them, and texts without secrets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shmserve.errors import InvalidRequest
from shmserve.repo.remote import stores
from shmserve.repo.remote.address import parse_address
from shmserve.repo.remote.credentials import FILE, Redactor, client_options
from shmserve.repo.remote.stores import missing_package
from tests.support.cases import cases


@cases(
    ("s3://bucket/a/b/", "", "bucket/a/b"),
    ("s3://minio:9000/bucket/a", "http://minio:9000", "bucket/a"),
    ("s3://https://minio.local:9000/bucket", "https://minio.local:9000", "bucket"),
    ("gs://bucket", "", "bucket"),
    ("as://account/container/a", "", "account/container/a"),
    ("https://host:81/models/", "https://host:81", "models"),
    ("hf://owner/repository@main/models", "", "owner/repository@main/models"),
)
def test_addresses(text: str, endpoint: str, path: str) -> None:
    found = parse_address(text)
    assert (found.endpoint, found.path) == (endpoint, path)
    assert parse_address(str(found)) == found


@cases(
    ("ftp://host/x", "unknown scheme; known are s3://"),
    ("owner/model", "the address of the model repository has no scheme; known are s3://"),
    ("s3://", "expected s3://BUCKET/PATH"),
    ("s3://bucket/../x", "expected s3://"),
    ("as://account", "expected as://ACCOUNT/CONTAINER"),
    ("http:///x", "expected http://HOST/PATH"),
    ("https://user:hunter2hunter2@host/x", "put it into ~/.netrc"),
    ("https://host/x?sig=hunter2hunter2", "would be visible to all users"),
    ("s3://key:hunter2hunter2@host:9000/bucket", "put it into ~/.netrc"),
)
def test_bad_addresses_are_refused_without_repeating_secrets(text: str, error: str) -> None:
    with pytest.raises(InvalidRequest, match="model repository") as raised:
        parse_address(text)
    assert error in raised.value.message
    assert "hunter2" not in raised.value.message


def test_a_missing_or_old_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "find_spec", lambda name: None)
    assert missing_package(parse_address("s3://b")).startswith("s3:// repositories need the package s3fs: ")
    assert "[http]" in missing_package(parse_address("https://host"))
    monkeypatch.undo()
    (tmp_path / "s3fs-0.4.2.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    text = missing_package(parse_address("s3://b"))
    assert text.startswith("s3:// repositories cannot be used: s3fs 0.4.2 is installed, and >=2024.6 is needed: ")
    assert "[s3]" in text
    assert missing_package(parse_address("hf://a/b")) == ""


def test_the_longest_prefix_of_tritons_credential_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {
        "s3": {
            "": {"key_id": "AKIAGENERAL", "secret_key": "general-secret", "region": "eu-central-1"},
            "s3://other": {"key_id": "AKIAOTHER1", "secret_key": "other-secret", "session_token": "other-token"},
            "s3://other/deep": {"profile": "deep"},
        },
        "gs": {"gs://bucket": "/google.json"},
        "as": {"": {"account_str": "me", "account_key": "azure-secret"}},
    }
    (tmp_path / "credentials.json").write_text(json.dumps(document))
    monkeypatch.setenv(FILE, str(tmp_path / "credentials.json"))
    redact = Redactor()

    def options(text: str) -> dict[str, object]:
        return client_options(parse_address(text), redact)

    assert options("s3://bucket/x") == {
        "key": "AKIAGENERAL",
        "secret": "general-secret",
        "client_kwargs": {"region_name": "eu-central-1"},
    }
    assert options("s3://other/x") == {"key": "AKIAOTHER1", "secret": "other-secret", "token": "other-token"}
    assert options("s3://otherwise/x")["key"] == "AKIAGENERAL"
    assert options("s3://other/deep/x") == {"profile": "deep"}
    assert (options("gs://bucket/x"), options("gs://b/x")) == ({"token": "/google.json"}, {})
    assert options("as://account/container") == {"account_name": "me", "account_key": "azure-secret"}
    text = redact("AKIAOTHER1 general-secret azure-secret x https://me:pw@host/a?sig=abc\n  end")
    assert text == "*** *** *** x https://***@host/a?*** end"
    (tmp_path / "credentials.json").write_text("{")
    with pytest.raises(InvalidRequest, match=FILE):
        options("s3://bucket")


@pytest.mark.parametrize(
    "path", ["../x", "a/../../x", "/etc/x", "a//b", "a/", "a\0b", "a\nb", "a\\b", ".", "", "x" * 256]
)
def test_file_names_outside_the_model_directory_are_refused(path: str) -> None:
    with pytest.raises(stores.StoreError, match="cannot be that of a file"):
        stores.checked("m", [stores.RemoteFile("fine", "k", 1, "t"), stores.RemoteFile(path, "k", 1, "t")])


def test_secrets_of_netrc_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("machine host login me password web-secret\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "from-the-environment")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=me;AccountKey=in-a-string==;EndpointSuffix=x")
    redact = Redactor()
    assert client_options(parse_address("https://host/x"), redact) == {"login": "me", "password": "web-secret"}
    assert client_options(parse_address("https://other/x"), redact) == {}
    assert redact("web-secret from-the-environment eu-central-1 in-a-string==") == "*** *** eu-central-1 ***"
