"""The agents that come with the server, by their methods. Oracles: hashlib, and the encryption of pyrage."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from shmserve.repo.agents import Agent, AgentModel, Refused
from shmserve.repo.agents.checksum import Checksum

WEIGHTS = os.urandom(3 << 20)


@pytest.fixture
def model(tmp_path: Path) -> AgentModel:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text('backend: "python"')
    (folder / "1" / "weights").write_bytes(WEIGHTS)
    return AgentModel("m", folder, tmp_path, {}, folder)


def refusal(agent: Agent, model: AgentModel) -> str:
    with pytest.raises(Refused) as refused:
        agent.load(model)
    return str(refused.value)


@pytest.mark.parametrize(("key", "algorithm"), [("MD5", "md5"), ("SHA256", "sha256"), ("SHA512", "sha512")])
def test_checksums(model: AgentModel, key: str, algorithm: str) -> None:
    right = hashlib.new(algorithm, WEIGHTS).hexdigest()
    Checksum().load(model._replace(parameters={f"{key}:1/weights": right.upper()}))
    wrong = "0" + right[1:] if right[0] != "0" else "1" + right[1:]
    text = refusal(Checksum(), model._replace(parameters={f"{key}:1/weights": wrong}))
    assert text == f"{key} of '1/weights' is {right}, expected {wrong}"


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({}, "it has no parameters"),
        ({"CRC:1/weights": "0"}, "parameter 'CRC:1/weights': expected ALGORITHM:FILE, with one of MD5, SHA256, SHA512"),
        ({"MD5": "0"}, "parameter 'MD5': expected ALGORITHM:FILE"),
        ({"MD5:1/none": "0"}, "file '1/none' cannot be read"),
        ({"MD5:../m/1/weights": "0"}, "without .."),
    ],
)
def test_invalid_checksum_parameters_are_refused(model: AgentModel, parameters: dict[str, str], text: str) -> None:
    assert text in refusal(Checksum(), model._replace(parameters=parameters))


class Signer:
    def __init__(self, root: Path, model: AgentModel) -> None:
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        self.renew()
        pem = self.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (root / "key.pem").write_bytes(pem)
        self.model = model._replace(parameters={"public_key_file": str(root / "key.pem")})

    def renew(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self.key = Ed25519PrivateKey.generate()

    def sign(self, *, leave_out: str = "") -> None:
        folder = self.model.folder
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        lines = [
            f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  ./{name}\n"
            for name in names
            if name != leave_out and not name.startswith("SHA256SUMS")
        ]
        (folder / "SHA256SUMS").write_text("".join(lines))
        (folder / "SHA256SUMS.sig").write_bytes(self.key.sign("".join(lines).encode()))


@pytest.fixture
def signer(tmp_path: Path, model: AgentModel) -> Signer:
    return Signer(tmp_path, model)


def signature_agent() -> Agent:
    from shmserve.repo.agents.signature import Signature

    return Signature()


def test_signed_models_are_accepted(signer: Signer) -> None:
    signer.sign()
    assert signature_agent().load(signer.model) is None


def test_unsigned_models_are_refused(signer: Signer, tmp_path: Path) -> None:
    agent, folder = signature_agent(), signer.model.folder
    assert "file 'SHA256SUMS' cannot be read" in refusal(agent, signer.model)
    signer.sign()
    (folder / "1" / "extra.py").write_text("import os")
    assert refusal(agent, signer.model) == "1 file(s) are not in SHA256SUMS, such as '1/extra.py'"
    (folder / "1" / "extra.py").unlink()
    (folder / "1" / "weights").write_bytes(WEIGHTS[:-1] + b"0")
    assert refusal(agent, signer.model) == "'1/weights' differs from what was signed"
    (folder / "1" / "weights").unlink()
    assert "file '1/weights' cannot be read" in refusal(agent, signer.model)
    (folder / "1" / "weights").write_bytes(WEIGHTS)
    (folder / "modules").symlink_to(tmp_path)
    assert "'modules' is a link to a directory" in refusal(agent, signer.model)
    (folder / "modules").unlink()
    (folder / "SHA256SUMS").write_text("something\n")
    assert "SHA256SUMS.sig is not a signature of SHA256SUMS" in refusal(agent, signer.model)
    signer.renew()
    signer.sign()
    assert "is not a signature of SHA256SUMS by the key" in refusal(agent, signer.model)


def test_the_public_key_must_be_outside_the_model_directory(signer: Signer, tmp_path: Path) -> None:
    agent, model = signature_agent(), signer.model
    signer.sign()
    (model.folder / "key.pem").write_bytes(Path(model.parameters["public_key_file"]).read_bytes())
    inside = {"public_key_file": str(model.folder / "key.pem")}
    assert "in the model's own directory" in refusal(agent, model._replace(parameters=inside))
    copied = model._replace(parameters=inside, folder=shutil.copytree(model.folder, tmp_path / "copy" / "m"))
    assert "in the model's own directory" in refusal(agent, copied)
    assert "expected an absolute path" in refusal(agent, model._replace(parameters={"public_key_file": "key.pem"}))
    assert "'public_key_file' is missing" in refusal(agent, model._replace(parameters={}))


@pytest.fixture
def in_memory() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm", prefix="shmserve-test-agents-") as place:
        yield Path(place)


def encrypted(model: AgentModel, root: Path) -> AgentModel:
    import pyrage

    identity = pyrage.x25519.Identity.generate()
    (root / "key").write_text(f"# created today\n{identity}\n")
    weights = model.folder / "1" / "weights"
    weights.with_name("weights.age").write_bytes(pyrage.encrypt(weights.read_bytes(), [identity.to_public()]))
    weights.unlink()
    return model._replace(parameters={"identity_file": str(root / "key")})


def decrypt_agent() -> Agent:
    from shmserve.repo.agents.decrypt import Decrypt

    return Decrypt()


def test_files_are_decrypted(model: AgentModel, tmp_path: Path, in_memory: Path) -> None:
    model = encrypted(model, tmp_path)._replace(work=in_memory)
    made = decrypt_agent().load(model)
    assert made == in_memory / "m"
    assert (made / "1" / "weights").read_bytes() == WEIGHTS
    assert (made / "1" / "weights").stat().st_mode & 0o777 == 0o600
    assert (made / "config.pbtxt").read_text() == 'backend: "python"'
    assert not list(made.rglob("*.age"))


def test_files_that_cannot_be_decrypted_are_refused(model: AgentModel, tmp_path: Path, in_memory: Path) -> None:
    agent = decrypt_agent()
    plain = model._replace(work=in_memory, parameters={"identity_file": "/dev/null"})
    assert refusal(agent, plain) == "identity_file has no key; `age-keygen -o FILE` makes one"
    model = encrypted(model, tmp_path)._replace(work=in_memory)
    file = model.folder / "1" / "weights.age"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert "'weights.age' cannot be decrypted" in refusal(agent, model)
    (tmp_path / "key").write_text("AGE-SECRET-KEY-1")
    assert "identity_file cannot be read" in refusal(agent, model)


def test_decrypted_files_never_reach_a_disk(model: AgentModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shmserve.repo.agents import decrypt

    monkeypatch.setattr(decrypt, "is_tmpfs", lambda descriptor: False)
    assert "the runtime directory is not on a tmpfs; use a --runtime-dir below /run" in refusal(
        decrypt_agent(), encrypted(model, tmp_path)
    )
