"""Which source a version uses. The oracle is what has changed on disk, and whether it may affect a worker."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from shmserve.broker.models import repositories as module
from shmserve.broker.models.catalog import PINS, Catalog, read_descriptor
from shmserve.broker.models.overrides import LoadOverride
from shmserve.broker.models.repositories import Reading, Repositories
from shmserve.core.effects import Spawn
from shmserve.core.events import Deploy, Event, Refuse
from shmserve.core.policy import InstanceSpec
from shmserve.errors import InvalidRequest, NotFound
from shmserve.protocol.worker_messages import Load
from shmserve.repo.compile import CoreSet
from shmserve.repo.config.override import parse_override
from shmserve.repo.config.schema import ModelConfig, as_triton_json, decode_config, encode_config
from shmserve.repo.storage.generation import Generations
from shmserve.repo.storage.snapshot import take
from shmserve.repo.storage.store import ScannedModel, scan_model
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
    (_, event), *refused = events
    assert isinstance(event, Deploy)
    assert all(isinstance(event, Refuse) for _, event in refused)
    return event


def sources(catalog: Catalog, given: LoadOverride | None = None) -> dict[int, int]:
    return {target.number: target.source for target in deploy(catalog, given).targets}


def loaded(catalog: Catalog, source: int) -> bytes:
    """The order that a worker would get."""
    _, descriptor = catalog.load_order(spawn(source))
    return read_descriptor(descriptor)


def order(catalog: Catalog, source: int) -> Load:
    load, descriptor = catalog.load_order(spawn(source))
    assert isinstance(decode_config(read_descriptor(descriptor)), ModelConfig)
    return load


def spawn(source: int) -> Spawn:
    return Spawn(1 << 20, "m", 1, source, InstanceSpec("m_0"))


# ---------------------------------------------------------------------------------------------- one source or two


def add(path: Path) -> Callable[[Path], object]:
    return lambda folder: (folder / path).write_text("something else")


def config(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.pbtxt").write_text(text)


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (lambda folder: None, set()),
        (add(Path("1/weights")), {1}),
        (add(Path("2/more")), {2}),
        (add(Path("labels.txt")), {1, 2}),
        (add(Path("shared")), {1, 2}),
        (add(Path("configs")), set()),
        (add(Path(".swp")), set()),
        (config(ALL.replace("8", "16")), {1, 2}),
        (config(ALL + 'parameters { key: "k" value: { string_value: "v" } }'), {1, 2}),
        (config("# a comment\n" + ALL.replace(" ", "  ")), set()),
        (config(ALL + GROUP.format(3)), set()),
        (config(ALL.replace("all { }", "specific { versions: [ 1, 2 ] }")), set()),
        (lambda folder: os.utime(folder / "1", ns=(1, 1)), set()),
        (lambda folder: (folder / "3").mkdir(), set()),
    ],
    ids=[
        *(
            "nothing",
            "file",
            "file added",
            "labels",
            "shared",
            "other configurations",
            "hidden",
            "batch size",
            "parameter",
        ),
        *("comment", "instances", "version policy", "time of a directory", "version"),
    ],
)
def test_only_relevant_changes_give_a_version_a_new_source(
    catalog: Catalog, root: Path, change: Callable[[Path], object], changed: set[int]
) -> None:
    first = sources(catalog)
    assert first.keys() == {1, 2}
    assert len(set(first.values())) == 2
    change(root / "m")
    second = sources(catalog)
    assert {number for number in first if second[number] != first[number]} == changed
    assert sources(catalog) == second


def test_an_overridden_configuration_gets_its_own_source(catalog: Catalog) -> None:
    first = sources(catalog)
    given = LoadOverride(parse_override(OVERRIDE), None)
    overridden = sources(catalog, given)
    assert set(overridden) == {2}, "the version policy is not the file's either"
    assert overridden[2] not in first.values()
    assert sources(catalog, given) == overridden
    assert decode_config(loaded(catalog, overridden[2])).max_batch_size == 3
    assert sources(catalog)[2] != overridden[2]


def test_a_version_kept_after_a_failed_load_keeps_its_source(catalog: Catalog) -> None:
    first = sources(catalog)
    broken = sources(catalog, LoadOverride(parse_override(OVERRIDE), None))
    catalog.prune(first.values())
    assert sources(catalog) == first
    catalog.prune(first.values())
    again = sources(catalog, LoadOverride(parse_override(OVERRIDE), None))
    assert again[2] not in {*broken.values(), *first.values()}, "nothing was made of the broken one any more"


def test_an_unloaded_model_is_read_again(catalog: Catalog) -> None:
    first = sources(catalog)
    catalog.forget("m")
    second = sources(catalog)
    assert not {*first.values()} & {*second.values()}, "though the old ones may still finish what they have"
    catalog.prune(second.values())
    with pytest.raises(KeyError):
        catalog.load_order(spawn(first[1]))


def test_a_model_moved_to_another_repository_gets_new_sources(catalog: Catalog, root: Path, tmp_path: Path) -> None:
    both = Catalog(Repositories([root, tmp_path / "other"]), {}, CoreSet((0,)))
    (tmp_path / "other").mkdir()
    first = sources(both)
    (root / "m").rename(tmp_path / "other" / "m")
    assert sources(both)[1] != first[1], "the files are the same, but not where a worker would look"


# ---------------------------------------------------------------------------------------------- instances, in place


def test_instances_change_in_place(catalog: Catalog, root: Path) -> None:
    before = deploy(catalog)
    (root / "m" / "config.pbtxt").write_text(ALL + GROUP.format(3))
    after = deploy(catalog, operation=7)
    assert after.operation == 7
    assert [target.source for target in after.targets] == [target.source for target in before.targets]
    assert [len(target.instances) for target in (*before.targets, *after.targets)] == [1, 1, 3, 3]
    assert decode_config(loaded(catalog, after.targets[0].source)).instance_group[0].count == 3


def test_instances_that_come_with_a_call_change_in_place(catalog: Catalog) -> None:
    before = deploy(catalog)
    config = decode_config(loaded(catalog, before.targets[0].source))
    more = replace(config, instance_group=(replace(config.instance_group[0], count=3),))
    after = deploy(catalog, LoadOverride(parse_override(json.dumps(as_triton_json(more)).encode()), None))
    assert [target.source for target in after.targets] == [target.source for target in before.targets]
    assert [len(target.instances) for target in after.targets] == [3, 3]
    assert all(catalog.is_override(target.source) for target in after.targets)
    assert [len(target.instances) for target in deploy(catalog).targets] == [1, 1]
    assert not any(catalog.is_override(target.source) for target in after.targets)


def test_a_completed_configuration_follows_changes_of_the_file(catalog: Catalog, root: Path) -> None:
    first = sources(catalog)
    with pytest.raises(NotFound):
        catalog.config(first[1])
    completed = replace(decode_config(loaded(catalog, first[1])), max_batch_size=5)
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
    given = decode_config(loaded(catalog, first[1]))
    with pytest.raises(InvalidRequest, match="changed its own name to 'other'"):
        catalog.complete(first[1], encode_config(replace(given, name="other")))
    with pytest.raises(InvalidRequest, match="max_batch_size"):
        catalog.complete(first[1], encode_config(replace(given, max_batch_size=-1)))
    with pytest.raises(NotFound):
        catalog.config(first[1])


# ---------------------------------------------------------------------------------------------- orders for workers


def test_a_worker_loads_the_files_as_they_were_read(catalog: Catalog, root: Path) -> None:
    """Large files are linked, and the order has their state."""
    number = sources(catalog)[1]
    (root / "m" / "1" / "weights").write_text("newer")
    (root / "m" / "labels.txt").unlink()
    load = order(catalog, number)
    assert (load.model, load.version, load.settings) == ("m", 1, {"default-max-batch-size": "4"})
    folder = Path(load.model_dir)
    assert folder.name == "m"
    assert not folder.is_relative_to(root)
    assert ((folder / "1" / "weights").read_text(), (folder / "labels.txt").read_text()) == ("a", "cat\n")
    (root / "m" / "1" / "weights").write_bytes(bytes((1 << 20) + 1))
    looks = json.loads(Path(order(catalog, sources(catalog)[1]).settings[PINS]).read_text())
    assert looks == {"1/weights": list(take(root / "m").files["1/weights"])}


def test_a_generation_is_removed_with_its_last_source(catalog: Catalog, root: Path) -> None:
    first = sources(catalog)
    made = set((root.parent / "kept").iterdir())
    assert len(made) == 2
    assert sources(catalog) == first
    assert set((root.parent / "kept").iterdir()) == made, "nothing has changed, and nothing is copied"
    (root / "m" / "1" / "weights").write_text("newer")
    second = sources(catalog)
    catalog.prune([*first.values(), *second.values()])
    assert len(list((root.parent / "kept").iterdir())) == 3
    catalog.prune(second.values())
    assert len(list((root.parent / "kept").iterdir())) == 2
    catalog.forget("m")
    catalog.prune([])
    assert list((root.parent / "kept").iterdir()) == []


# ---------------------------------------------------------------------------------------------- what is forgotten


def test_directories_of_overrides_are_removed_with_their_last_source(catalog: Catalog, tmp_path: Path) -> None:
    """Two versions may share one."""
    folders = [model(tmp_path / f"given{number}", "m", "") for number in range(3)]
    (folders[0] / "2").mkdir()
    both = parse_override(OVERRIDE.replace(b'"identity"', b'"identity", "version_policy": {"all": {}}'))
    overridden = [sources(catalog, LoadOverride(both, folder)) for folder in folders]
    made = [found[max(found)] for found in overridden]
    assert len(set(made)) == 3
    load = order(catalog, made[2])
    assert (load.model_dir, PINS in load.settings) == (str(folders[2]), False), "without a copy"
    catalog.prune([made[0]])
    assert [folder.exists() for folder in folders] == [True, False, True], "the last is about to be served"
    catalog.forget("m")
    catalog.prune([made[0]])
    assert [folder.exists() for folder in folders] == [True, False, False]
    catalog.prune([])
    assert list(tmp_path.glob("given*")) == []


def test_uploaded_files_are_removed_if_they_cannot_be_read(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model(tmp_path / "given", "m", "")

    def fail(*_: object, **__: object) -> None:
        raise InvalidRequest("no luck")

    monkeypatch.setattr(module, "scan_model", fail)
    with pytest.raises(InvalidRequest, match="no luck"):
        catalog.repositories.read("m", LoadOverride(parse_override(OVERRIDE), folder))
    assert not folder.parent.exists()
    with pytest.raises(InvalidRequest, match="no luck"):
        catalog.repositories.read("m")


# ---------------------------------------------------------------------------------------------- going back


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
    assert (Path(order(catalog, served[0]).model_dir) / "labels.txt").read_text() == "cat\n"
    assert catalog.is_rejected(catalog.repositories.read("m")), "until it changes"
    (root / "m" / "labels.txt").write_text("bird\n")
    assert not catalog.is_rejected(catalog.repositories.read("m"))


# ---------------------------------------------------------------------------------------------- what is refused


def refused(events: list[Event]) -> list[tuple[str, int, str]]:
    return [(event.model, event.version, event.reason) for _, event in events if isinstance(event, Refuse)]


def test_a_broken_model_is_refused(catalog: Catalog, root: Path) -> None:
    (root / "m" / "config.pbtxt").write_text(ALL.replace("max_batch", "max_bach"))
    events = catalog.adopt(catalog.repositories.read("m"))
    ((name, version, reason),) = refused(events)
    assert (name, version, len(events)) == ("m", 0, 1)
    assert "m/config.pbtxt:2" in reason
    assert str(root) not in reason


def test_a_version_without_its_file_is_refused_alone(catalog: Catalog, root: Path) -> None:
    (root / "m" / "config.pbtxt").write_text(ALL.replace("identity", "python"))
    (root / "m" / "2" / "model.py").write_text("")
    events = catalog.adopt(catalog.repositories.read("m"))
    assert isinstance(events[0][1], Deploy)
    assert [target.number for target in events[0][1].targets] == [2]
    ((name, version, reason),) = refused(events)
    assert (name, version) == ("m", 1)
    assert "model.py" in reason


def test_a_model_in_two_repositories_is_refused(root: Path, tmp_path: Path) -> None:
    model(tmp_path / "other", "m", GOOD)
    model(tmp_path / "other", "n", GOOD)
    both = Catalog(Repositories([root, tmp_path / "other"]), {}, CoreSet((0,)))
    with pytest.raises(InvalidRequest, match="model appears in two or more repositories: 'm' is in 2 of them"):
        both.repositories.read("m")
    found = {reading.scanned.name: reading for reading in both.repositories.read_all()}
    assert len(refused(both.adopt(found["m"]))) == 1
    assert refused(both.adopt(found["n"])) == []


@pytest.mark.parametrize(
    "name", ["", " ", "../m", "..", ".", "m/", "/m", "m/1", ".hidden", "a\0b", "m\n", "é", "x" * 200]
)
def test_invalid_and_unknown_model_names_are_refused(catalog: Catalog, name: str) -> None:
    with pytest.raises((InvalidRequest, NotFound)):
        catalog.repositories.read(name)
    with pytest.raises(NotFound, match=r"failed to load 'mm', failed to poll from model repository.*did you mean 'm'"):
        catalog.repositories.read("mm")


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
    reading: Reading = catalog.repositories.read("m")
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


def test_the_reason_names_the_runtime_directory_that_is_full(catalog: Catalog, root: Path, monkeypatch: Any) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Generations, "keep", full)
    text = f"cannot copy its files to the runtime directory {root.parent}/kept: No space left on device"
    assert [problem.text for problem in catalog.repositories.read("m").scanned.problems] == [text]
