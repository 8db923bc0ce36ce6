"""How the library of a backend is found, linked and refused, and what its faults leave behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmserve.errors import ServeError
from shmserve.testing import Server
from tests.support.cases import cases
from tests.support.ensemble_models import config_text
from tests.support.living import until
from tests.support.model_files import write_model
from tests.support.shared_server import SharedServer
from tests.support.workers.native_backends import compiled, model

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("native")]
HERE = Path(__file__).parent
PROBE = config_text("probe", "IN", "OUT", "max_batch_size: 4")
X = np.arange(3, dtype=np.float32).reshape(1, 3)
FINALIZING = """
import sys
from pathlib import Path
from unittest.mock import patch
from shmserve.repo.config.schema import encode_config
from shmserve.protocol.worker_messages import Load
from shmserve.repo.storage.store import scan_model
from shmserve.workers.backends.native import backend
from shmserve.workers.loading import load

path = Path(sys.argv[1])
order = Load(1, path.name, 1, f"{path.name}_0_0", str(path), {})
model = load(order, encode_config(scan_model(path).config), None)
with patch.object(backend, "FINALIZE_S", 0.1):
    model.close()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("libraries")


@pytest.fixture(scope="module")
def library(folder: Path) -> Path:
    return compiled(HERE / "backend.c", folder / "libtriton_probe.so")


@pytest.fixture(scope="module")
def server(folder: Path, library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a backend directory."""
    root, directory = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("backends")
    for name in ("probe", "identity"):
        (directory / name).mkdir()
        (directory / name / f"libtriton_{name}.so").write_bytes(library.read_bytes())
    for name, backend in {"shared": "probe", "preferred": "identity", "refused": "other", "above": "above"}.items():
        write_model(root, name, PROBE.replace("probe", backend))
    model(root, "runtime", compiled(HERE / "backend.c", folder / "libmine.so"), f'{PROBE} runtime: "libmine.so"')
    model(root, "unready", compiled(HERE / "unknown.c", folder / "unready" / "libtriton_probe.so", "-DUNREADY"), PROBE)
    (root / "above" / "libtriton_above.so").write_bytes(library.read_bytes())
    options = ["--backend-directory", str(directory), "--backend-config=native,prefer=identity"]
    with Server(root, *options, "--exit-on-error=false", "--log-verbose=1", gateway=True) as running:
        yield running


@pytest.mark.parametrize("name", ["shared", "preferred", "runtime", "above"])
def test_where_a_library_is_found(server: Server, name: str) -> None:
    with server.client() as client:
        result = client.infer(name, {"IN": X})
        np.testing.assert_array_equal(result["OUT"], X)
        assert result.parameters["buffers"] == 1  # only the library sets it


def test_verbosity_follows_the_flag(server: Server, shared_server: SharedServer, library: Path, tmp_path: Path) -> None:
    def texts(running: Server) -> str:
        with running.client() as client:
            return " ".join(record["text"] for record in client.logs("shared")["records"])

    with server.client() as client:  # output of a worker may be logged after its answers
        until(client, lambda: "a verbose message" in texts(server))
    model(tmp_path, "shared", library, PROBE)
    with shared_server.serving(tmp_path) as running:
        assert "a verbose message" not in texts(running)


def test_a_backend_that_is_not_found_is_named(server: Server) -> None:
    with server.client() as client, pytest.raises(ServeError, match='found "other", which this server does not have'):
        client.infer("refused", {"IN": X})


@pytest.mark.parametrize("soname", ["libtritonserver.so", "libtritonserver-0123abcd.so.2"])
def test_a_library_links_under_any_name(shared_server: SharedServer, tmp_path: Path, folder: Path, soname: str) -> None:
    library = compiled(HERE / "backend.c", folder / soname / "libtriton_probe.so", soname=soname)
    model(tmp_path, "linked", library, PROBE)
    with shared_server.serving(tmp_path) as running, running.client() as client:
        np.testing.assert_array_equal(client.infer("linked", {"IN": X})["OUT"], X)


@cases(
    ("UNKNOWN", "needs functions that this server does not have: TRITONBACKEND_ModelInstanceImagine"),
    ("BATCHER", r"has a batching strategy of its own \(TRITONBACKEND_ModelBatchIncludeRequest\)"),
    ("NEWER", "the backend needs version 1.99 of the interface"),
)
def test_a_library_that_cannot_run_is_refused_with_the_reason(
    kind: str, text: str, shared_server: SharedServer, tmp_path: Path, folder: Path
) -> None:
    library = compiled(HERE / "unknown.c", folder / kind / "libtriton_probe.so", f"-D{kind}")
    model(tmp_path, "refused", library, PROBE)
    with pytest.raises(ServeError, match=text), shared_server.serving(tmp_path):
        pass


def test_a_backend_says_whether_its_instance_is_ready(server: Server) -> None:
    with server.client() as client:
        assert client.ready("shared")
        assert not client.ready("unready")


def test_a_file_that_is_no_library_is_refused(shared_server: SharedServer, tmp_path: Path) -> None:
    path = tmp_path / "libtriton_probe.so"
    path.write_text("text")
    model(tmp_path / "models", "refused", path, PROBE)
    text = "'libtriton_probe.so' is not a shared library"
    with pytest.raises(ServeError, match=text), shared_server.serving(tmp_path / "models"):
        pass


def test_an_exception_of_cpp_ends_the_worker_only(shared_server: SharedServer, tmp_path: Path, folder: Path) -> None:
    library = compiled(HERE / "throwing.cc", folder / "cpp" / "libtriton_probe.so")
    model(tmp_path, "throwing", library, PROBE)
    with shared_server.serving(tmp_path) as running, running.client() as client:
        with pytest.raises(ServeError, match=r"instance 'throwing_0_0' ended .* \(signal SIGABRT\)"):
            client.infer("throwing", {"IN": X})
        until(client, lambda: any("a fault in C++" in one["text"] for one in client.logs("throwing")["records"]))


def test_a_hanging_backend_is_killed_with_children(shared_server: SharedServer, tmp_path: Path, library: Path) -> None:
    limit = 'parameters { key: "execution_limit_secs" value { string_value: "1" } }'
    model(tmp_path, "hanging", library, PROBE + limit)
    with shared_server.serving(tmp_path) as running, running.client() as client:
        client.infer("hanging", {"IN": X}, parameters={"do": "child"})  # the leak check finds it if it stays
        with pytest.raises(ServeError, match="execution_limit_secs"):
            client.infer("hanging", {"IN": X}, parameters={"do": "hang"})
        np.testing.assert_array_equal(client.infer("hanging", {"IN": X})["OUT"], X)


def test_finalization_has_a_deadline(library: Path, tmp_path: Path) -> None:
    stuck = 'parameters { key: "finalize" value { string_value: "stuck" } }'
    model(tmp_path, "stuck", library, PROBE + stuck)
    done = subprocess.run([sys.executable, "-c", FINALIZING, str(tmp_path / "stuck")], capture_output=True, text=True)
    assert (done.returncode, "was not finalized within 0.1 s" in done.stderr) == (68, True), done.stderr
