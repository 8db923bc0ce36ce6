"""A repository agent that is controlled by its parameters and records its calls."""

from __future__ import annotations

from pathlib import Path

SOURCE = """
import os
import select
import shutil
import signal
from pathlib import Path

from shmserve.repo.agents import Agent, Refused


class RepositoryAgent(Agent):
    def load(self, model):
        self.note("load", model)
        what = model.parameters.get("what", "")
        if what == "refuse":
            raise Refused("not today")
        if what == "raise":
            raise ValueError("a mistake")
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hang":
            select.select([], [], [])
        if what == "nowhere":
            return Path("nowhere")
        if what == "talk":
            for number in range(300):
                print("line", number)
        if what == "tamper":  # like a write through a mapping of the file: neither its size nor its time changes
            file = model.origin / "1" / "generation"
            before = file.stat()
            file.write_text("9" * before.st_size)
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        if what == "replace":
            made = model.work / "made"
            shutil.copytree(model.folder, made)
            for file in made.glob("1/generation"):
                file.write_text(str(float(file.read_text()) + 100))
            return made
        return None

    def unload(self, model):
        self.note("unload", model)
        if model.parameters.get("what") == "raise at unload":
            raise ValueError("a mistake")
        if model.parameters.get("what") == "hang at unload" and Path(model.parameters["notes"] + ".hang").exists():
            select.select([], [], [])

    def note(self, action, model):
        with open(model.parameters["notes"], "a") as notes:
            print(action, model.parameters["called"], model.name, model.folder.is_dir(), file=notes)
"""


def write_agent(directory: Path, name: str) -> None:
    (directory / name).mkdir(parents=True)
    (directory / name / "agent.py").write_text(SOURCE)


def agents_text(*agents: tuple[str, dict[str, str]]) -> str:
    """The part of a configuration with these agents and their parameters."""
    given = []
    for name, parameters in agents:
        pairs = "".join(f' parameters {{ key: "{key}" value: "{value}" }}' for key, value in parameters.items())
        given.append(f'{{ name: "{name}"{pairs} }}')
    return f"model_repository_agents {{ agents [ {', '.join(given)} ] }}\n"
