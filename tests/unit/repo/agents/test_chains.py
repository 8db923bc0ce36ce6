"""Chains of agents in real processes: order, failures, output and leftovers."""

from __future__ import annotations

import gc
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import msgspec
import pytest

from shmserve.errors import InvalidRequest, ServeError, Unavailable
from shmserve.repo.agents import chains as module
from shmserve.repo.agents.chains import AgentChains, AgentSettings
from shmserve.repo.agents.process import AgentProcess, _Output
from shmserve.repo.agents.record import read_chain
from shmserve.repo.config.schema import ModelRepositoryAgents
from tests.support.cases import cases
from tests.support.repo.agents import write_agent

pytestmark = pytest.mark.process


class Place:
    """A model `m`, two agents that record their calls, and a directory for their output."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = root / "models" / "m"
        (self.model / "1").mkdir(parents=True)
        (self.model / "1" / "generation").write_text("1")
        self.work = root / "work"
        self.work.mkdir()
        self.directory = root / "agents"
        for name in ("a", "b"):
            write_agent(self.directory, name)
        self.notes = root / "notes"
        self.printed: list[str] = []
        self.settings = AgentSettings(str(self.directory), {}, (), 60.0)

    def chains(self, **more: Any) -> AgentChains:
        settings = self.settings._replace(**more)
        return AgentChains(
            self.work, settings, lambda line, model: self.printed.append(f"{model}: {line}"), lambda work: work()
        )

    def agents(self, first: str = "", second: str = "") -> ModelRepositoryAgents:
        return self.given(("a", first), ("b", second))

    def given(self, *agents: tuple[str, str]) -> ModelRepositoryAgents:
        plain = [
            {"name": name, "parameters": {"what": what, "called": name, "notes": str(self.notes)}}
            for name, what in agents
        ]
        return msgspec.convert({"agents": plain}, ModelRepositoryAgents)

    def noted(self) -> list[str]:
        return self.notes.read_text().splitlines() if self.notes.exists() else []

    def left(self) -> list[str]:
        return [path.name for path in self.work.iterdir()]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_agents_run_in_order_and_end_in_reverse_order(place: Place) -> None:
    chains = place.chains()
    prepared: Any = chains.prepare("m", place.model, place.agents("replace", "replace"), "1")
    assert (prepared.folder / "1" / "generation").read_text() == "201.0"
    assert prepared.folder.name == "m", "the directory's name is the model's"
    assert place.noted() == ["load a m True", "load b m True"]
    assert (place.model / "1" / "generation").read_text() == "1"
    again = chains.prepare("m", place.model, place.agents("replace", "replace"), "1")
    assert again is prepared, "the same files are prepared once"
    other = chains.prepare("m", place.model, place.agents("replace", "replace"), "2")
    assert other is not prepared
    del again, other
    gc.collect()
    assert place.noted()[4:] == ["unload b m True", "unload a m True"]
    assert len(place.left()) == 1
    del prepared
    gc.collect()
    assert place.noted()[6:] == ["unload b m True", "unload a m True"]
    assert not place.left()


def test_an_agent_is_a_module_and_imports_others_beside_it(place: Place) -> None:
    folder = place.directory / "wordy"
    folder.mkdir()
    agent = """
    from __future__ import annotations
    from dataclasses import dataclass
    from shmserve.repo.agents import Agent, Refused
    from words import REFUSAL
    @dataclass
    class Words:
        text: str
    class RepositoryAgent(Agent):
        def load(self, model):
            raise Refused(Words(REFUSAL).text)
    """
    (folder / "agent.py").write_text(dedent(agent))
    (folder / "words.py").write_text("REFUSAL = 'as its module says'")
    with pytest.raises(InvalidRequest, match="repository agent 'wordy' refused the model: as its module says"):
        place.chains().prepare("m", place.model, place.given(("wordy", "")), "1")
    assert sorted(path.name for path in folder.iterdir()) == ["agent.py", "words.py"], "bytecode is not written there"


def test_settings_of_the_server(place: Place) -> None:
    for required, agents, text in (
        ((), place.given(("c", "")), "'c' is not installed; there are a, b, checksum, convert, decrypt"),
        (("b",), place.given(("a", "")), "agent 'b', which the server requires"),
        (("b",), None, "agent 'b', which the server requires"),
    ):
        with pytest.raises(InvalidRequest, match=text):
            place.chains(required=required).prepare("m", place.model, agents, "1")
    assert place.chains().prepare("m", place.model, None, "1") is None
    assert not place.noted()
    with pytest.raises(InvalidRequest, match="'a' refused the model"):
        place.chains(config={"a,what": "refuse", ",called": "anyone"}).prepare("m", place.model, place.agents(), "1")
    assert place.noted() == ["load anyone m True"]
    with pytest.raises(Unavailable, match=r"longer than 0\.5 s \(--load-limit-secs\)"):
        place.chains(limit_s=0.5).prepare("m", place.model, place.agents("", "hang"), "1")
    assert not place.left()
    place.chains().prepare("m", place.model, place.given(("a", "talk")), "1")
    assert (place.printed[0], place.printed[-1]) == ("m: line 0", "m: 100 further lines were dropped")
    assert len(place.printed) == 201


@cases(
    ("refuse", "repository agent 'b' refused the model: not today"),
    ("raise", "repository agent 'b' failed: ValueError: a mistake"),
    ("nowhere", "load() returned 'nowhere', which is not a directory"),
    ("die", "its repository agents were killed by SIGKILL"),
)
def test_a_failed_agent_unloads_the_agents_before_it(what: str, text: str, place: Place) -> None:
    chains = place.chains()
    with pytest.raises(ServeError) as failed:
        chains.prepare("m", place.model, place.agents("replace", what), "1")
    assert text in failed.value.message
    assert place.noted() == ["load a m True", "load b m True", "unload a m True"]
    assert not place.left()
    if what == "raise":
        assert any("ValueError: a mistake" in line for line in place.printed), "the log has the traceback"


def test_only_loaded_agents_are_unloaded_at_the_next_start(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other agent is notified, and no unnecessary process is started."""
    killed = place.chains()
    monkeypatch.setattr(killed, "_release", lambda *_: None)  # the server is killed before it cleans up
    digest = hashlib.sha256((place.model / "1" / "generation").read_bytes()).hexdigest()
    checked = {"agents": [{"name": "checksum", "parameters": {"SHA256:1/generation": digest}}]}
    kept = [killed.prepare("checked", place.model, msgspec.convert(checked, ModelRepositoryAgents), "1")]
    for name, what in (("refused", "refuse"), ("cut short", "die"), ("at once", "")):
        agents = place.given(("a", "die")) if name == "at once" else place.agents("", what)
        with pytest.raises(ServeError):
            killed.prepare(name, place.model, agents, "1")
    assert len(place.left()) == 4
    assert place.noted().count("unload a refused True") == 1
    started: list[str] = []

    class Process(AgentProcess):
        def __init__(self, command: Sequence[str], line: Callable[[str], None]) -> None:
            started.append(read_chain(Path(command[3])).model)
            super().__init__(command, line)

    monkeypatch.setattr(module, "AgentProcess", Process)
    place.chains().recover()
    assert started == ["cut short"]
    assert [line for line in place.noted() if line.startswith("unload")] == [
        "unload a refused True",
        "unload a cut short True",
    ]
    assert not place.left()
    kept.clear()
    (place.work / "chain-without-record").mkdir()
    place.chains().recover()
    assert not place.left(), "the server was killed before it had written the record"


def test_all_agents_share_the_time_limit_at_shutdown(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOP_S", 0.5)
    hang = place.root / "notes.hang"
    hang.touch()
    chains = place.chains()
    agents = place.given(("a", "hang at unload"))
    prepared = [chains.prepare(name, place.model, agents, name) for name in ("x", "y")]
    chains.interrupt()
    chains.close()
    assert len(place.left()) == 1, "the limit has passed before the second was told"
    prepared.clear()
    gc.collect()
    assert len(place.left()) == 1
    hang.unlink()
    place.chains().recover()
    assert [line for line in place.noted() if " y " in line] == ["load a y True", "unload a y True"]
    assert not place.left()


def test_a_stopping_server_does_not_wait_for_agents_but_unloads_all(place: Place) -> None:
    chains = place.chains()
    prepared = chains.prepare("m", place.model, place.agents("", "raise at unload"), "1")
    assert prepared is not None
    over = threading.Event()

    def interrupt() -> None:
        while place.noted().count("load b m True") < 2 and not over.wait(0.01):
            pass
        chains.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    for _ in range(2):
        with pytest.raises(Unavailable, match="killed by SIGKILL"):
            chains.prepare("m", place.model, place.agents("", "hang"), "2")
    over.set()
    thread.join()
    chains.close()
    assert place.noted()[-2:] == ["unload b m True", "unload a m True"]
    assert any("failed to unload model 'm'" in line for line in place.printed)
    assert not place.left()


def test_a_read_ends_while_the_process_continues_to_print() -> None:
    """Otherwise its time limit is not enforced."""
    printed, end = os.pipe()
    os.set_blocking(printed, False)
    lines: list[str] = []

    def line(text: str) -> None:
        lines.append(text)
        os.write(end, b"again\n")

    try:
        output = _Output(line)
        os.write(end, b"first\n")
        assert output.read(printed)
        assert lines == ["first"]
        assert output.read(printed)
        assert lines == ["first", "again"]
    finally:
        os.close(printed)
        os.close(end)
