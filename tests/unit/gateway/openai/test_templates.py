"""Chat templates: what they get, what they may do, and how they are bounded."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from shmserve.errors import InvalidRequest, ServeError, Unsupported
from shmserve.gateway.limits.body_budget import Budget
from shmserve.gateway.limits.caller_shares import ShareExceeded
from shmserve.gateway.openai import templates
from shmserve.gateway.openai.errors import BadParameter
from shmserve.gateway.openai.templates import TemplateRenderer, TemplateThread, template_values

pytest.importorskip("jinja2")
ADDRESS = "192.0.2.1"


def render(template: str, messages: list[dict[str, Any]], tools: Any = None, **arguments: Any) -> str:
    values = template_values(messages, tools, arguments, {"bos_token": "<s>", "other": "secret"})
    return TemplateRenderer().render(template, values)


ROLES = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == "system" %}{% continue %}{% endif %}
    <{{ message["role"] }}>{{ message.content | trim }}
{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}
{{- other }}"""


def test_a_template() -> None:
    """As Hugging Face renders it: blocks take no lines, loops can be continued, and other parameters are unknown."""
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": " hi "}]
    assert render(ROLES, messages) == "<s>    <user>hi\n<assistant>"
    assert render(ROLES, messages, add_generation_prompt=False) == "<s>    <user>hi\n"


def test_values() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": parts},
        {"role": "assistant", "tool_calls": [call, {"function": {"arguments": "{"}}, 5]},
    ]
    text = render('{{ messages | tojson }}|{{ tools | tojson(indent=1) }}|{{ "<&>" | tojson }}', messages, [{"a": "é"}])
    found, tools, escaped = text.split("|")
    assert json.loads(found) == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"x": [1]}}},
                                             {"function": {"arguments": "{"}}, 5]},
    ]  # fmt: skip
    assert (tools, escaped) == ('[\n {\n  "a": "é"\n }\n]', '"<&>"')
    assert messages[0]["content"] != "a\nb", "the request is not changed"


@pytest.mark.parametrize("part", [{"type": "image_url"}, {"type": "text"}, {"type": "text", "text": 1}, "a", None])
def test_parts_that_are_no_text(part: Any) -> None:
    with pytest.raises(BadParameter, match="has a part that is not a text"):
        render("", [{"role": "user", "content": [part]}])


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ('{{ raise_exception("not so") }}', "refuses the messages: not so"),
        ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "access to attribute 'append'"),
        ("{{ messages[0].content() }}", "not callable"),
        ("{{ missing.thing }}", "is undefined"),
        ("{% for i in range(1000000) %}{% endfor %}", "Range too big"),
        ("{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}", "more than 8388608 characters"),
        ("{% include 'x' %}", "no loader"),
    ],
)
def test_templates_that_fail(template: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        render(template, [{"role": "user", "content": "x" * 1000}])


def test_invalid_templates() -> None:
    with pytest.raises(Unsupported, match="chat template of the model is invalid"):
        render("{% for %}", [])


def test_the_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "SECONDS", -1.0)
    with pytest.raises(InvalidRequest, match="characters, or -1 seconds"):
        render("a", [])


# ---------------------------------------------------------------------------------------- the thread


@pytest.fixture
def thread() -> Iterator[TemplateThread]:
    made = TemplateThread(Budget(60))
    yield made
    made.close()


def rendered(thread: TemplateThread, *templates: str, size: int = 1) -> list[str | ServeError]:
    async def run() -> list[str | ServeError]:
        found: list[str | ServeError] = []
        done = asyncio.Event()

        def take(one: str | ServeError) -> None:
            found.append(one)
            if len(found) == len(templates):
                done.set()

        for template in templates:
            thread.render("", template, {"a": 1}, size, take, take)
        await done.wait()
        return found

    return asyncio.run(run())


def test_the_thread(thread: TemplateThread) -> None:
    first, second, third = rendered(thread, "{{ a }}", "{% for %}", "{{ a + 1 }}")
    assert (first, third) == ("1", "2")
    assert isinstance(second, Unsupported)
    assert rendered(thread, "{{ a }}") == ["1"], "it outlives a loop"


def test_what_is_cancelled_is_not_rendered(thread: TemplateThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's share counts it until the thread has come to it."""
    entered, gate = threading.Event(), threading.Event()
    rendered: list[str] = []

    def render(renderer: TemplateRenderer, template: str, values: dict[str, Any]) -> str:
        rendered.append(template)
        entered.set()
        assert gate.wait(60)
        return template

    async def run() -> list[str]:
        found: list[str] = []
        done = asyncio.Event()
        try:
            first = thread.render(ADDRESS, "first", {}, 5, found.append, ignore)
            await asyncio.to_thread(entered.wait, 60)
            second = thread.render(ADDRESS, "second", {}, 5, found.append, ignore)
            thread.render(ADDRESS, "third", {}, 5, found.append, ignore)
            first.cancelled = second.cancelled = True
            with pytest.raises(ShareExceeded, match="15 bytes of messages wait"):
                thread.render(ADDRESS, "fourth", {}, 5, ignore, ignore)
            thread.render("192.0.2.2", "another", {}, 5, lambda text: done.set(), ignore)
        finally:
            gate.set()
        await done.wait()
        return found

    monkeypatch.setattr(TemplateRenderer, "render", render)
    assert asyncio.run(run()) == ["third"]
    assert rendered == ["first", "third", "another"]


def ignore(found: object) -> None: ...


def test_limits_of_the_thread(thread: TemplateThread) -> None:
    with pytest.raises(BadParameter, match="4194305 bytes of JSON; the limit for a chat template is 4194304"):
        thread.render("", "", {}, (4 << 20) + 1, ignore, ignore)
    assert rendered(thread, "a", "b", size=10) == ["a", "b"]
    assert rendered(thread, "a", "b", size=10) == ["a", "b"], "those that were rendered do not count"
    with pytest.raises(ShareExceeded, match="0 bytes of messages wait for their chat templates; 16 more would exceed"):
        rendered(thread, "a", size=16)
