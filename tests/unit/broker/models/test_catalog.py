"""Which source a version uses, and which versions differ from the repository. The oracle is what the test has changed
on disk, and whether it may affect a worker."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from msgspec.structs import replace

from shmserve.broker.models import differences
from shmserve.broker.models import repositories as module
from shmserve.broker.models.catalog import Catalog, read_descriptor
from shmserve.broker.models.differences import Differences, LoadedVersion, compare
from shmserve.broker.models.overrides import LoadOverride
from shmserve.broker.models.repositories import ModelReading, Repositories
from shmserve.core.effects import Spawn
from shmserve.core.events import Deploy, Refuse
from shmserve.core.policy import InstanceSpec
from shmserve.errors import InvalidRequest, NotFound
from shmserve.protocol.worker_messages import Load
from shmserve.repo.backends import PINS
from shmserve.repo.compile import CoreSet
from shmserve.repo.config.override import parse_override
from shmserve.repo.config.schema import ModelConfig, as_triton_json, decode_config, encode_config
from shmserve.repo.storage.generation import Generations
from shmserve.repo.storage.snapshot import take
from shmserve.repo.storage.store import ScannedModel, scan_model
from tests.support.cases import cases
from tests.support.manual_loop import ThreadedLoop
from tests.support.repo.models import GOOD, model

ALL = GOOD + "version_policy { all { } }\n"
OVERRIDE = b"""{"backend": "identity", "max_batch_size": 3,
"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [3]}],
"output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [3]}]}"""
GROUP = "instance_group [ {{ count: {} kind: KIND_CPU }} ]\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = model(tmp_path / "models", "m", ALL, {"1/weights": "a", "labels.txt": "cat\n"})
    (folder / "2").mkdir()
    (folder / "2" / "weights").write_text("b")
    return tmp_path / "models"


@pytest.fixture
def catalog(root: Path) -> Catalog:
    (root.parent / "kept").mkdir()
    generations = Generations(root.parent / "kept")
    settings = {"default-max-batch-size": "4"}
    return Catalog(Repositories([root], generations=generations), settings, CoreSet((0, 1, 2, 3)))


def deploy(catalog: Catalog, given: LoadOverride | None = None, operation: int = 0) -> Deploy:
    events = catalog.adopt(catalog.repositories.read("m", given), operation)
    event, *refused = events
    assert isinstance(event, Deploy)
    assert all(isinstance(event, Refuse) for event in refused)
    return event


def sources(catalog: Catalog, given: LoadOverride | None = None) -> dict[int, int]:
    return {target.number: target.source for target in deploy(catalog, given).targets}


def order(catalog: Catalog, source: int) -> tuple[Load, ModelConfig]:
    """The order that a worker would get, and its configuration."""
    load, descriptor = catalog.load_order(Spawn(1 << 20, "m", 1, source, InstanceSpec("m_0")))
    return load, decode_config(read_descriptor(descriptor))


INSTANCES = ALL + GROUP.format(3)
VERSIONS = ALL.replace("all { }", "specific { versions: [ 1, 2 ] }")
PARAMETER = ALL + 'parameters { key: "k" value: { string_value: "v" } }'


@cases(
    ("1/weights", "newer", {1}),
    ("2/more", "newer", {2}),
    ("labels.txt", "dog", {1, 2}),
    ("shared", "", {1, 2}),
    ("configs", "", set()),
    (".swp", "", set()),
    ("config.pbtxt", ALL.replace("8", "16"), {1, 2}),
    ("config.pbtxt", PARAMETER, {1, 2}),
    ("config.pbtxt", "# a comment\n" + ALL.replace(" ", "  "), set()),
    ("config.pbtxt", INSTANCES, set()),
    ("config.pbtxt", VERSIONS, set()),
)
def test_only_relevant_changes_give_a_version_a_new_source(
    path: str, text: str, changed: set[int], catalog: Catalog, root: Path
) -> None:
    first = sources(catalog)
    assert first.keys() == {1, 2}
    assert len(set(first.values())) == 2
    os.utime(root / "m" / "1", ns=(1, 1))
    (root / "m" / "3").mkdir()
    assert {number: sources(catalog)[number] for number in first} == first, "a directory does not count"
    (root / "m" / path).write_text(text)
    second = sources(catalog)
    assert {number for number in first if second[number] != first[number]} == changed
    assert {number: sources(catalog)[number] for number in second} == second


def test_sources_after_overrides_failures_and_unloads(catalog: Catalog, root: Path, tmp_path: Path) -> None:
    first = sources(catalog)
    given = LoadOverride(parse_override(OVERRIDE), None)
    overridden = sources(catalog, given)
    assert set(overridden) == {2}, "the version policy is not the file's either"
    assert overridden[2] not in first.values()
    assert sources(catalog, given) == overridden
    assert order(catalog, overridden[2])[1].max_batch_size == 3
    catalog.prune(first.values())
    assert sources(catalog) == first, "versions that were kept after a failed load"
    catalog.prune(first.values())
    again = sources(catalog, given)
    assert again[2] not in {*overridden.values(), *first.values()}, "nothing was made of the broken one any more"
    catalog.forget("m")
    second = sources(catalog)
    assert not {*first.values()} & {*second.values()}, "though the old ones may still finish what they have"
    catalog.prune(second.values())
    with pytest.raises(KeyError):
        order(catalog, first[1])
    (tmp_path / "other").mkdir()
    both = Catalog(Repositories([root, tmp_path / "other"]), {}, CoreSet((0,)))
    first = sources(both)
    (root / "m").rename(tmp_path / "other" / "m")
    assert sources(both)[1] != first[1], "the files are the same, but not where a worker would look"


def test_instances_of_the_file_and_of_a_call_change_in_place(catalog: Catalog, root: Path) -> None:
    def changed(given: LoadOverride | None = None) -> list[int]:
        after = deploy(catalog, given, operation=7)
        assert after.operation == 7
        assert [target.source for target in after.targets] == served
        assert [catalog.is_override(source) for source in served] == [given is not None] * 2
        return [len(target.instances) for target in after.targets]

    served = [target.source for target in deploy(catalog).targets]
    config = order(catalog, served[0])[1]
    more = replace(config, instance_group=(replace(config.instance_group[0], count=2),))
    assert changed(LoadOverride(parse_override(json.dumps(as_triton_json(more)).encode()), None)) == [2, 2]
    assert changed() == [1, 1]
    (root / "m" / "config.pbtxt").write_text(INSTANCES)
    assert changed() == [3, 3]
    assert order(catalog, served[0])[1].instance_group[0].count == 3


def test_a_completed_configuration_follows_changes_of_the_file(catalog: Catalog, root: Path) -> None:
    first = sources(catalog)
    with pytest.raises(NotFound):
        catalog.config(first[1])
    completed = replace(order(catalog, first[1])[1], max_batch_size=5)
    policy, said = catalog.complete(first[1], encode_config(completed))
    assert policy.max_batch == 5
    assert isinstance(said, list)
    assert catalog.complete(first[1], encode_config(completed)) == (policy, []), "the second instance says nothing new"
    assert msgspec.json.decode(catalog.config_json(first[1])) == as_triton_json(completed)
    (root / "m" / "config.pbtxt").write_text(ALL.replace("all { }", "latest { num_versions: 2 }") + GROUP.format(2))
    assert sources(catalog) == first
    shown = catalog.config(first[1])
    assert (shown.max_batch_size, shown.instance_group[0].count) == (5, 2)
    assert shown.version_policy is not None
    assert shown.version_policy.latest is not None
    encoded = catalog.config_json(first[1])
    assert msgspec.json.decode(encoded) == as_triton_json(shown), "and not what was encoded before"
    assert catalog.config_json(first[1]) is encoded
    origins, text = catalog.origins(first[1])
    assert origins["max_batch_size"] == "model"
    assert "count: 2" in text


def test_a_worker_cannot_change_the_model_name_or_complete_invalid_values(catalog: Catalog) -> None:
    first = sources(catalog)
    given = order(catalog, first[1])[1]
    with pytest.raises(InvalidRequest, match="changed its own name to 'other'"):
        catalog.complete(first[1], encode_config(replace(given, name="other")))
    with pytest.raises(InvalidRequest, match="max_batch_size"):
        catalog.complete(first[1], encode_config(replace(given, max_batch_size=-1)))
    with pytest.raises(NotFound):
        catalog.config(first[1])


def test_a_worker_cannot_pass_a_pipe_as_its_configuration() -> None:
    read_end, write_end = os.pipe()
    with pytest.raises(InvalidRequest, match="must be a memfd: Illegal seek"):
        read_descriptor(read_end)
    os.close(write_end)


def test_a_worker_loads_the_files_as_they_were_read(catalog: Catalog, root: Path) -> None:
    """Large files are linked, and the order has their state."""
    number = sources(catalog)[1]
    (root / "m" / "1" / "weights").write_text("newer")
    (root / "m" / "labels.txt").unlink()
    load, _ = order(catalog, number)
    assert (load.model, load.version, load.settings) == ("m", 1, {"default-max-batch-size": "4"})
    folder = Path(load.model_dir)
    assert folder.name == "m"
    assert not folder.is_relative_to(root)
    assert ((folder / "1" / "weights").read_text(), (folder / "labels.txt").read_text()) == ("a", "cat\n")
    (root / "m" / "1" / "weights").write_bytes(bytes((1 << 20) + 1))
    looks = json.loads(Path(order(catalog, sources(catalog)[1])[0].settings[PINS]).read_text())
    assert looks == {"1/weights": list(take(root / "m").files["1/weights"])}


def test_directories_of_overrides_are_removed_with_their_last_source(catalog: Catalog, tmp_path: Path) -> None:
    """Two versions may share one."""
    folders = [model(tmp_path / f"given{number}", "m", "") for number in range(3)]
    (folders[0] / "2").mkdir()
    both = parse_override(OVERRIDE.replace(b'"identity"', b'"identity", "version_policy": {"all": {}}'))
    overridden = [sources(catalog, LoadOverride(both, folder)) for folder in folders]
    made = [found[max(found)] for found in overridden]
    assert len(set(made)) == 3
    load, _ = order(catalog, made[2])
    assert (load.model_dir, PINS in load.settings) == (str(folders[2]), False), "without a copy"
    catalog.prune([made[0]])
    assert [folder.exists() for folder in folders] == [True, False, True], "the last is about to be served"
    catalog.forget("m")
    catalog.prune([made[0]])
    assert [folder.exists() for folder in folders] == [True, False, False]
    catalog.prune([])
    assert list(tmp_path.glob("given*")) == []


def test_a_model_is_rolled_back_to_the_previous_generation(catalog: Catalog, root: Path) -> None:
    with pytest.raises(NotFound, match="'m': it has no previous generation"):
        catalog.previous("m", 1, [])
    first = deploy(catalog)
    (root / "m" / "labels.txt").write_text("dog\n")
    second = deploy(catalog)
    served = [target.source for target in first.targets]
    catalog.replaced("m", served)
    newer = [target.source for target in second.targets]
    catalog.prune(newer)
    assert not catalog.is_rejected(catalog.repositories.read("m"))
    assert catalog.previous("m", 7, newer) == replace(first, operation=7, present=None)
    assert (Path(order(catalog, served[0])[0].model_dir) / "labels.txt").read_text() == "cat\n"
    assert catalog.is_rejected(catalog.repositories.read("m")), "until it changes"
    (root / "m" / "labels.txt").write_text("bird\n")
    assert not catalog.is_rejected(catalog.repositories.read("m"))


def test_a_model_that_changes_while_it_is_read(catalog: Catalog, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is read again until configuration and files match. A model that keeps changing is used as it is."""
    changes = 1
    scans = 0

    def meddled(folder: Path, **more: Any) -> ScannedModel:
        nonlocal changes, scans
        scans += 1
        found = scan_model(folder, **more)
        if changes:
            changes -= 1
            (folder / "config.pbtxt").write_text(ALL.replace("8", str(100 + changes)))
        return found

    monkeypatch.setattr(module, "scan_model", meddled)
    reading: ModelReading = catalog.repositories.read("m")
    assert reading.scanned.config is not None
    assert (reading.scanned.config.max_batch_size, scans) == (100, 2)
    assert reading.snapshot == take(root / "m")
    changes, scans = 10, 0
    reading = catalog.repositories.read("m")
    assert scans == 3
    assert reading.scanned.config is not None


def test_a_remote_model_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version uses the tree that was read last, which must not be dropped; the old one may be."""
    for tree in ("1", "2"):
        model(tmp_path / "trees", tree, ALL)
    view = tmp_path / "views" / "key"
    view.mkdir(parents=True)
    (view / "m").symlink_to("../../trees/1")

    def meddled(folder: Path, **more: Any) -> ScannedModel:
        found = scan_model(folder, **more)
        (view / "m").unlink()
        (view / "m").symlink_to("../../trees/2")
        return found

    monkeypatch.setattr(module, "scan_model", meddled)
    catalog = Catalog(Repositories([view]), {}, CoreSet((0,)))
    reading = catalog.repositories.read("m")
    assert reading.snapshot == take(tmp_path / "trees" / "2")
    catalog.adopt(reading)
    assert catalog.trees() == {"2"}


def test_what_cannot_be_read_is_refused(
    catalog: Catalog, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = root / "m" / "config.pbtxt"
    config.write_text(ALL.replace("identity", "python"))
    (root / "m" / "2" / "model.py").write_text("")
    served, refused = catalog.adopt(catalog.repositories.read("m"))
    assert isinstance(served, Deploy)
    assert isinstance(refused, Refuse)
    assert [target.number for target in served.targets] == [2]
    assert (refused.model, refused.version, "model.py" in refused.reason) == ("m", 1, True), "without its file, alone"
    config.write_text(ALL.replace("max_batch", "max_bach"))
    (refused,) = catalog.adopt(catalog.repositories.read("m"))
    assert isinstance(refused, Refuse)
    assert (refused.model, refused.version, "m/config.pbtxt:2" in refused.reason) == ("m", 0, True)
    assert str(root) not in refused.reason
    with pytest.raises(InvalidRequest):
        catalog.repositories.read("../m")
    with pytest.raises(NotFound, match=r"failed to load 'mm', failed to poll from model repository.*did you mean 'm'"):
        catalog.repositories.read("mm")
    config.write_text(ALL)
    monkeypatch.setattr(Generations, "keep", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    text = f"cannot copy its files to the runtime directory {root.parent}/kept: No space left on device"
    assert [problem.text for problem in catalog.repositories.read("m").scanned.problems] == [text]
    folder = model(tmp_path / "given", "m", "")

    def fail(*_: object, **__: object) -> None:
        raise InvalidRequest("no luck")

    monkeypatch.setattr(module, "scan_model", fail)
    with pytest.raises(InvalidRequest, match="no luck"):
        catalog.repositories.read("m", LoadOverride(parse_override(OVERRIDE), folder))
    assert not folder.parent.exists(), "uploaded files are removed"


def versions(folder: Path) -> Path:
    for version in ("1", "2"):
        (folder / version).mkdir(parents=True)
        (folder / version / "file").write_text("a")
    (folder / "config.pbtxt").write_text("c")
    return folder


def loaded(folder: Path, source: int, version: int, configuration: bool = True) -> LoadedVersion:
    seen = take(folder)
    return LoadedVersion(
        source, folder, version, seen.of_version(version), seen.of_configuration() if configuration else None
    )


@pytest.mark.parametrize(
    ("path", "changed"),
    [("1/file", {1, 3}), ("2/more", {2}), ("labels.txt", {1, 2, 3}), ("config.pbtxt", {1, 2}), (".hidden", set())],
)
def test_changed_files_are_found_per_version(tmp_path: Path, path: str, changed: set[int]) -> None:
    folder = versions(tmp_path / "m")
    entries = [loaded(folder, 1, 1), loaded(folder, 2, 2), loaded(folder, 3, 1, configuration=False)]
    assert compare(entries) == {1: False, 2: False, 3: False}
    (folder / path).write_text("changed")
    assert {source for source, differs in compare(entries).items() if differs} == changed
    folder.rename(tmp_path / "other")
    assert set(compare(entries).values()) == {True}, "a model that was removed differs"


def test_a_comparison_is_bounded(tmp_path: Path) -> None:
    entries = [loaded(versions(tmp_path / str(number)), number, 1) for number in range(4)]
    files = len(take(tmp_path / "0").files)
    assert list(compare(entries, files + 1)) == [0, 1]


class Compared:
    """Three loaded versions whose comparisons always stop after the first, which differs."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        entries = [loaded(versions(folder / str(number)), number, 1) for number in range(3)]
        self.loop = ThreadedLoop()
        self.comparisons: list[list[int]] = []
        self.answers: list[Set[int]] = []
        self.differences = Differences(self.loop, lambda: entries)
        patch.setattr(differences, "compare", self._compare)

    def _compare(self, entries: list[LoadedVersion]) -> dict[int, bool]:
        self.comparisons.append([entry.source for entry in entries])
        return {entries[0].source: True}

    def check(self) -> None:
        self.differences.check(self.answers.append)


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compared]:
    made = Compared(tmp_path, monkeypatch)
    yield made
    made.differences.close()


def test_simultaneous_callers_share_one_comparison(compared: Compared) -> None:
    for _ in range(3):
        compared.check()
    (timeout,) = compared.loop.timers
    compared.loop.run_one()
    assert (len(compared.comparisons), compared.answers) == (1, [{0}] * 3)
    assert timeout.cancelled, "or it would answer later callers too early"
    compared.check()
    assert compared.answers == [{0}] * 4, "compared a moment ago"
    assert not compared.loop.timers


def test_a_disk_that_does_not_respond(compared: Compared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers wait for a limited time, and the next comparison begins where this one ended."""
    monkeypatch.setattr(differences, "FRESH_S", 0.0)
    compared.check()
    compared.loop.fire()
    assert compared.answers == [set()]
    compared.loop.run_one()
    compared.check()
    compared.loop.run_one()
    assert (compared.comparisons, compared.answers) == ([[0, 1, 2], [1, 2, 0]], [set(), {0, 1}])
