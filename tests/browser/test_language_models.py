""" "Try it" for language models, which is a chat, and for embedding models, which compares two texts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmserve.testing import Server
from tests.browser.conftest import Site, serving
from tests.support.browser.tab import Tab
from tests.support.cases import cases
from tests.support.gateway.language_models import LanguageModels, write_language_models
from tests.support.gateway.running_gateway import open_gate
from tests.support.living import until
from tests.support.optional import optional

pytestmark = pytest.mark.process

openai = optional("openai")
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("language") / "models"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def files(repository: Path) -> LanguageModels:
    return write_language_models(repository)


@pytest.fixture(scope="module")
def site(repository: Path, files: LanguageModels) -> Iterator[Site]:
    with serving(Server(repository), repository) as site:
        yield site


SEND = "#chat button[type=submit]"
LAST_ANSWER = "#talk li:last-child[data-role=assistant] .said:last-child"


def open_chat(tab: Tab, model: str = "talk") -> None:
    tab.go(f"#/model/{model}/try")
    tab.wait_for("form#chat")


def say(tab: Tab, text: str) -> None:
    """Sends a message after the end of the last answer: until then, the button stops the answer."""
    tab.wait_for(SEND, "Send")
    lines = tab.evaluate("document.querySelectorAll('#talk li').length")
    tab.write("#message", text)
    tab.click(SEND)
    tab.wait(f"document.querySelectorAll('#talk li').length > {lines}")


def answer(tab: Tab, expected: str) -> str:
    """The last answer, once it has ended. It contains this text."""
    tab.wait_for(LAST_ANSWER, expected)
    tab.wait_for(SEND, "Send")
    return tab.text(LAST_ANSWER)


def test_a_conversation(tab: Tab, files: LanguageModels) -> None:
    open_chat(tab)
    tab.write("#system", "Be brief.")
    say(tab, "a GATE b")
    tab.expect_text(LAST_ANSWER, "a")
    tab.expect_text(SEND, "Stop")
    open_gate(files.gate)
    assert answer(tab, "a GATE b") == "a GATE b"
    assert re.fullmatch(r"3 tokens, [\d.,]+ ?k? tokens/s", tab.text("#chat [role=status]"))
    tab.write("#temperature", "0.5")
    tab.write("#more", '{"seed": 7}')
    say(tab, "PARAMETERS DOCUMENT")
    sampling, _, document = answer(tab, "messages").partition(' {"messages')
    assert json.loads(sampling) == {"temperature": 0.5, "seed": 7}
    sent = json.loads('{"messages' + document)["messages"]
    said = [("system", "Be brief."), ("user", "a GATE b"), ("assistant", "a GATE b"), ("user", "PARAMETERS DOCUMENT")]
    assert [(one["role"], one["content"]) for one in sent] == said
    say(tab, "a FAIL")
    tab.wait_for("#talk [data-role=error] [role=alert]", "a word that fails")
    tab.click("#clear")
    tab.expect_text("#talk", "")


def test_an_answer_is_stopped(tab: Tab, site: Site, files: LanguageModels) -> None:
    open_chat(tab)
    say(tab, "FOREVER again")
    tab.wait_for(LAST_ANSWER, "again again again")
    tab.click(SEND)
    tab.wait_for("#chat [role=status]", "stopped after")
    with site.server.client() as client:
        until(client, lambda: files.log.read_text() == "cancelled\n", "the end of the sequence")
    say(tab, "and on")
    answer(tab, "and on")
    say(tab, "FOREVER again")
    tab.wait_for(LAST_ANSWER, "again again again")
    tab.click("#clear")
    say(tab, "DOCUMENT")
    assert [one["role"] for one in json.loads(answer(tab, "messages"))["messages"]] == ["user"]


def test_tools_are_called_and_their_results_returned(tab: Tab) -> None:
    open_chat(tab)
    tab.write("#tools", "[")
    say(tab, "CALL")
    tab.wait_for("#talk [data-role=error]", "Tools: ")
    tab.write("#tools", json.dumps(TOOLS))
    tab.click(SEND)
    tab.wait_for("[data-call=weather]", 'weather({"x": 1})')
    tab.wait_for("#chat label[for=message]", "Result of weather")
    say(tab, "DOCUMENT")
    sent = json.loads(answer(tab, "tool_call_id"))["messages"]
    assert [one["role"] for one in sent] == ["user", "assistant", "tool"]
    assert sent[2] == {"role": "tool", "tool_call_id": "call_1", "content": "DOCUMENT"}
    tab.wait_for("#chat label[for=message]", "Message")


def test_thinking_is_not_part_of_the_conversation(tab: Tab) -> None:
    open_chat(tab, "thinks")
    say(tab, "<think> hm </think> yes")
    assert answer(tab, "yes").strip() == "yes"
    tab.wait_for("#talk li:last-child .hint", "hm")
    say(tab, "DOCUMENT")
    assert "hm" not in json.loads(answer(tab, "messages"))["messages"][1]["content"]


def test_images_are_sent(tab: Tab, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"\x89PNG" + bytes(1000))
    open_chat(tab)
    tab.choose_file("#images", picture)
    say(tab, "IMAGES")
    answer(tab, f"[{zlib.crc32(picture.read_bytes())}]")


def test_a_text_is_continued(tab: Tab) -> None:
    """By a model that cannot chat."""
    tab.go("#/model/bare/try")
    tab.wait_for("form#chat label[for=message]", "Text")
    say(tab, "one two")
    answer(tab, "one two")


def test_the_similarity_of_texts(tab: Tab) -> None:
    """The embedding of the model is made from the length of the text and its first letter."""
    tab.go("#/model/embed/try")
    tab.wait_for("form#texts")
    tab.write("#first", "abc")
    tab.write("#second", "b")
    for dimensions, length in ((3, np.linalg.norm([3, 1, 0.1])), (2, 1)):  # shortened vectors have the length 1
        one, other = np.array([3, 1, 0.1])[:dimensions], np.array([1, 0, 0.1])[:dimensions]
        expected = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
        tab.write("#dimensions", str(dimensions) if dimensions < 3 else "")
        tab.click("#texts button[type=submit]")
        for text in (f"{expected:.4f}", f"{dimensions} dimensions", f"length {length:.6g} ["):
            tab.wait_for("#similarity", text)
    tab.write("#dimensions", "9")
    tab.click("#texts button[type=submit]")
    tab.wait_for("#texts [role=alert]", "'dimensions' is 9")


@cases(("talk", "#message", 'it\'s "a" 大', 's "a" 大'), ("embed", "#first", "abc", "[3.0,1.0,0.1"))
def test_the_code_returns_the_same(model: str, area: str, text: str, expected: str, tab: Tab) -> None:
    tab.go(f"#/model/{model}/try")
    tab.wait_for(area)
    tab.write(area, text)
    tab.wait_for("pre[data-code=python]", text[:3])
    for command in (
        [sys.executable, "-c", tab.text("pre[data-code=python]")],
        ["bash", "-c", tab.text("pre[data-code=curl]").replace("curl ", "curl -s ")],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert expected in done.stdout.replace('\\"', '"').replace(", ", ",")


def test_tensors_are_offered_too(tab: Tab) -> None:
    open_chat(tab)
    tab.click(".ways .chip:last-of-type")
    tab.wait_for("form#try")
    tab.expect("document.querySelector('form#chat')", None)
