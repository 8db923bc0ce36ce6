"""The agents that come with the server, by their methods. Oracles: hashlib, and the encryption of pyrage."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pyrage
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from shmserve.repo.agents import Agent, AgentModel, Refused, decrypt
from shmserve.repo.agents.built_in import Checksum
from shmserve.repo.agents.signature import Signature
from tests.support.cases import cases

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


@cases(
    ({}, "it has no parameters"),
    ({"CRC:1/weights": "0"}, "parameter 'CRC:1/weights': expected ALGORITHM:FILE, with one of MD5, SHA256, SHA512"),
    ({"MD5": "0"}, "parameter 'MD5': expected ALGORITHM:FILE"),
    ({"MD5:1/none": "0"}, "file '1/none' cannot be read"),
    ({"MD5:../m/1/weights": "0"}, "without .."),
)
def test_invalid_checksum_parameters_are_refused(parameters: dict[str, str], text: str, model: AgentModel) -> None:
    assert text in refusal(Checksum(), model._replace(parameters=parameters))


class Signer:
    def __init__(self, root: Path, model: AgentModel) -> None:
        self.renew()
        pem = self.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (root / "key.pem").write_bytes(pem)
        self.model = model._replace(parameters={"public_key_file": str(root / "key.pem")})

    def renew(self) -> None:
        self.key = Ed25519PrivateKey.generate()

    def sign(self) -> None:
        folder = self.model.folder
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        lines = [
            f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  ./{name}\n"
            for name in names
            if not name.startswith("SHA256SUMS")
        ]
        (folder / "SHA256SUMS").write_text("".join(lines))
        (folder / "SHA256SUMS.sig").write_bytes(self.key.sign("".join(lines).encode()))


@pytest.fixture
def signer(tmp_path: Path, model: AgentModel) -> Signer:
    return Signer(tmp_path, model)


def test_only_signed_models_are_accepted(signer: Signer, tmp_path: Path) -> None:
    agent, folder = Signature(), signer.model.folder
    assert "file 'SHA256SUMS' cannot be read" in refusal(agent, signer.model)
    signer.sign()
    agent.load(signer.model)
    (folder / "1" / "extra.py").write_text("import os")
    assert refusal(agent, signer.model) == "'1/extra.py' is not in SHA256SUMS"
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
    agent, model = Signature(), signer.model
    signer.sign()
    (model.folder / "key.pem").write_bytes(Path(model.parameters["public_key_file"]).read_bytes())
    inside = {"public_key_file": str(model.folder / "key.pem")}
    assert "in the model's own directory" in refusal(agent, model._replace(parameters=inside))
    copied = model._replace(parameters=inside, folder=shutil.copytree(model.folder, tmp_path / "copy" / "m"))
    assert "in the model's own directory" in refusal(agent, copied)
    assert "expected an absolute path" in refusal(agent, model._replace(parameters={"public_key_file": "key.pem"}))
    assert "'public_key_file' is missing" in refusal(agent, model._replace(parameters={}))


def test_files_are_decrypted_into_memory_only(
    model: AgentModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, identity = decrypt.Decrypt(), pyrage.x25519.Identity.generate()
    (tmp_path / "key").write_text(f"# created today\n{identity}\n")
    file = model.folder / "1" / "weights.age"
    content = pyrage.encrypt(WEIGHTS, [identity.to_public()])
    file.write_bytes(content)
    file.with_name("weights").unlink()
    with TemporaryDirectory(dir="/dev/shm", prefix="shmserve-test-agents-") as memory:
        given = model._replace(work=Path(memory), parameters={"identity_file": str(tmp_path / "key")})
        made = agent.load(given)
        assert made == Path(memory) / "m"
        assert (made / "1" / "weights").read_bytes() == WEIGHTS
        assert (made / "1" / "weights").stat().st_mode & 0o777 == 0o600
        assert (made / "config.pbtxt").read_text() == 'backend: "python"'
        assert not list(made.rglob("*.age"))
        shutil.rmtree(made)
        with monkeypatch.context() as patch:
            patch.setattr(decrypt, "is_tmpfs", lambda descriptor: False)
            text = "the runtime directory is not on a tmpfs; use a --runtime-dir below /run"
            assert text in refusal(agent, given)
        file.write_bytes(content[:-1])
        assert "'weights.age' cannot be decrypted" in refusal(agent, given)
        (tmp_path / "key").write_text("AGE-SECRET-KEY-1")
        assert "identity_file cannot be read" in refusal(agent, given)
        without = given._replace(parameters={"identity_file": "/dev/null"})
        assert refusal(agent, without) == "identity_file has no key; `age-keygen -o FILE` makes one"
