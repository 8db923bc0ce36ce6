"""The page on the OpenAI-compatible endpoints: its models are served, its commands and programs give the results shown,
and its lists are complete."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator

import pytest

from shmserve.clients.cli import main
from shmserve.gateway.openai import bodies, collection, generation, images, renderer, templates
from shmserve.testing import Server
from tests.support.docs import pages
from tests.support.patience import PATIENCE_S
from tests.support.shared_server import SharedServer

PAGE = pages.page("openai")
ADDRESS = "localhost:8000"


@pytest.fixture(scope="module")
def server(shared_server: SharedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("page")
    names = pages.write_files(PAGE, folder)
    assert names == [
        f"models/{name}/{file}" for name in ("parrot", "letters") for file in ("config.pbtxt", "1/model.py")
    ]
    assert main.main(["check", str(folder / "models")]) == 0
    with shared_server.serving(folder / "models") as running:
        yield running


def run(server: Server, words: list[str]) -> str:
    address = server.endpoints["http"]
    command = [word.replace(ADDRESS, address) for word in words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout


@pytest.mark.process
def test_commands(server: Server) -> None:
    words = [shlex.split(line) for line in pages.commands("openai")]
    assert [line[:2] for line in words[:2]] == [["pip", "install"], ["shmserve", "serve"]]
    models, chat, stream = [run(server, line) for line in words[2:] if line[0] == "curl"]
    assert [found["id"] for found in json.loads(models)["data"]] == ["letters", "parrot"]
    assert json.loads(chat)["choices"][0]["message"]["content"] == "Hello to you"
    *events, done, end = stream.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [("Hello", None), (" to", "length")]


@pytest.mark.process
def test_programs(server: Server) -> None:
    pytest.importorskip("openai")
    programs = [block for block in pages.blocks(PAGE, "python") if "OpenAI(" in block]
    expected = pages.blocks(PAGE, "text")
    assert len(programs) == len(expected) == 2
    for program, text in zip(programs, expected, strict=True):
        said = pages.run_program(server, program.replace(ADDRESS, server.endpoints["http"]))
        assert said.strip() == text.strip()


def test_fields_and_limits() -> None:
    fields = {*bodies.CompletionRequest.__struct_fields__, *bodies.ChatRequest.__struct_fields__}
    fields |= {*bodies.EmbeddingRequest.__struct_fields__}
    named = set(re.findall(r"`([a-z_]+)[`.]", PAGE))
    assert fields - named - {"input"} == set()
    limits = (
        f"up to {bodies.PROMPTS} prompts, with up to {bodies.CHOICES} choices",
        f"up to {generation.AT_ONCE} of them are in flight at a time",
        f"up to {collection.AT_ONCE} of them are in flight at a time",
        f"**Several texts**, up to {bodies.TEXTS}, become one request each",
        f"A chat may have {images.IMAGES} images, an image {images.IMAGE_BYTES >> 20} MiB",
        f"Messages that wait for rendering may take {templates.WAITING_BYTES >> 20} MiB together",
        f"{templates.INPUT_BYTES >> 20} MiB of JSON, a prompt to {renderer.TEXT_CHARACTERS >> 20} Mi characters",
    )
    text = " ".join(PAGE.split())
    for words in limits:
        assert words in text
