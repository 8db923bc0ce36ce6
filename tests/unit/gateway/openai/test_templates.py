"""Chat templates: their variables, permitted operations, and limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.errors import InvalidRequest, ServeError, Unsupported
from shmserve.gateway.limits.body_budget import Budget
from shmserve.gateway.limits.caller_shares import ShareExceeded
from shmserve.gateway.openai import renderer, templates
from shmserve.gateway.openai.errors import BadParameter
from shmserve.gateway.openai.templates import ChatTemplates, template_values
from tests.support.cases import cases
from tests.support.gateway.language_models import ENDLESS

pytest.importorskip("jinja2")


def render(template: str, messages: list[dict[str, Any]], tools: Any = None, **arguments: Any) -> str:
    values = template_values(messages, tools, arguments, {"bos_token": "<s>", "other": "secret"})
    return renderer.render(template, json.loads(json.dumps(values)))


ROLES = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == "system" %}{% continue %}{% endif %}
    <{{ message["role"] }}>{{ message.content | trim }}
{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}
{{- other }}"""


def test_a_template() -> None:
    """Rendering equals Hugging Face's: blocks take no lines, loops can be continued, and other parameters are
    undefined."""
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
def test_parts_that_are_not_text(part: Any) -> None:
    with pytest.raises(BadParameter, match="has a part that is not a text"):
        render("", [{"role": "user", "content": [part]}])


@cases(
    ('{{ raise_exception("not so") }}', InvalidRequest, "refuses the messages: not so"),
    ("{{ messages.__class__.__mro__ }}", InvalidRequest, "access to attribute '__class__'"),
    ("{{ messages.append(1) }}", InvalidRequest, "access to attribute 'append'"),
    ("{{ messages[0].content() }}", InvalidRequest, "not callable"),
    ("{{ missing.thing }}", InvalidRequest, "is undefined"),
    ("{% for i in range(1000000) %}{% endfor %}", InvalidRequest, "Range too big"),
    ("{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}", InvalidRequest, "more than 8388608 char"),
    ("{% include 'x' %}", InvalidRequest, "no loader"),
    ("{% for %}", Unsupported, "chat template of the model is invalid"),
)
def test_templates_that_fail(template: str, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        render(template, [{"role": "user", "content": "x" * 1000}])


ITERATORS = """\
{%- set roles = messages | map(attribute="role") -%}
{{ "user" in roles }} {{ messages | map(attribute="role") | sort | join(",") }}
{%- for one in messages | selectattr("role", "equalto", "user") %} {{ loop.index }}/{{ loop.length }}{% endfor %}
{{- " " ~ (messages | rejectattr("role", "equalto", "user") | list | length) }}"""
MACROS = """\
{%- macro tree(depth) %}{{ depth }}{% if depth %}{{ tree(depth - 1) | upper }}{% endif %}{% endmacro -%}
{%- macro quoted() %}<{{ caller() }}>{% endmacro -%}
{%- for item in [[1], [2, [3]]] recursive %}{{ loop(item) if item is not number else item }},{% endfor -%}
{% call quoted() %}{{ tree(2) }}{% endcall %}"""


def test_iterators_of_filters_macros_and_recursive_loops() -> None:
    messages = [{"role": role} for role in ("user", "system", "user")]
    assert render(ITERATORS, messages) == "True system,user,user 1/2 2/2 1"
    assert render(MACROS, []) == "1,,2,3,,,<210>"


class Chat:
    """The exchange of a chat. `result`: the prompt or the error."""

    def __init__(
        self, made: ChatTemplates, template: str, caller: str = "a", messages: Any = (), size: int = 0
    ) -> None:
        self.address = caller
        self.result: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.watcher: Any = None
        exchange: Any = self
        values = json.dumps({"messages": messages}).ljust(size).encode()
        made.render(exchange, template, values, self.result.set_result)

    def payer(self) -> Any:
        return SimpleNamespace(caller=self.address)

    def watch(self, watcher: Any) -> None:
        self.watcher = watcher

    def fail(self, error: ServeError) -> None:
        self.result.set_exception(error)


def run(work: Callable[[ChatTemplates], Awaitable[None]], budget: Budget | None = None) -> None:
    async def main() -> None:
        made = ChatTemplates(budget or Budget(1 << 30))
        try:
            await work(made)
        finally:
            await made.close()

    asyncio.run(asyncio.wait_for(main(), 60))


CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"
MESSAGES = [{"content": letter} for letter in "abc"]


def test_a_template_that_loops_does_not_delay_the_chats_of_other_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller has one process, however many chats it sends. If the processes are not enough for the callers, a
    template that loops loses its own."""
    monkeypatch.setattr(templates, "PROCESSES", 2)
    monkeypatch.setattr(templates, "SECONDS", 3600.0)
    monkeypatch.setattr(templates, "FAIR_SECONDS", 0.1)

    async def work(made: ChatTemplates) -> None:
        first, *more = [Chat(made, ENDLESS, "slow") for _ in range(5)]
        assert await Chat(made, CHAT, "b", MESSAGES).result == "abc"
        assert not first.result.done()
        other = Chat(made, ENDLESS, "other")
        last = Chat(made, CHAT, "b", MESSAGES)
        with pytest.raises(InvalidRequest, match=r"more than 0\.1 seconds while other callers wait"):
            await first.result
        for chat in (*more, other):
            chat.watcher.disconnected()
        assert await last.result == "abc"

    run(work)


def test_a_template_whose_process_starts_slowly_loses_it_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "PROCESSES", 1)
    monkeypatch.setattr(templates, "SECONDS", 3600.0)
    monkeypatch.setattr(templates, "FAIR_SECONDS", 0.0)
    renderer, rendering = templates._Renderer, templates._Rendering  # noqa: SLF001 - when a process starts is invisible
    start, end = renderer.start, rendering.end

    async def work(made: ChatTemplates) -> None:
        tried = asyncio.Event()

        def noted(one: Any, why: str) -> bool:
            tried.set()
            return end(one, why)

        async def slow() -> Any:
            await tried.wait()
            return await start()

        monkeypatch.setattr(rendering, "end", noted)
        monkeypatch.setattr(renderer, "start", slow)
        first, last = Chat(made, ENDLESS, "slow"), Chat(made, CHAT, "b", MESSAGES)
        with pytest.raises(InvalidRequest, match="while other callers wait"):
            await first.result
        assert await last.result == "abc"

    run(work)


def test_finished_and_failed_templates_release_their_share() -> None:
    budget = Budget(600)

    async def work(made: ChatTemplates) -> None:
        first = Chat(made, CHAT, size=100)
        assert budget.held == 100
        with pytest.raises(ShareExceeded, match="100 bytes of messages wait for their chat templates; 500 more would"):
            Chat(made, CHAT, size=500)
        other, gone = Chat(made, CHAT, "b", size=100), Chat(made, "{% for %}", "c", size=100)
        gone.watcher.disconnected()
        assert [await first.result, await other.result] == ["", ""]
        with pytest.raises(BadParameter, match="4194305 bytes of JSON; the limit for a chat template is 4194304"):
            Chat(made, CHAT, size=(4 << 20) + 1)
        with pytest.raises(Unsupported):
            await Chat(made, "{% for %}", "c", size=100).result
        assert budget.held == 0
        assert not gone.result.done()

    run(work, budget)
