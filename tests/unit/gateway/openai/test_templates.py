"""Chat templates: their variables, permitted operations, and limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from shmserve.errors import InvalidRequest, Unsupported
from shmserve.gateway.limits.body_budget import Budget
from shmserve.gateway.limits.caller_shares import ShareExceeded
from shmserve.gateway.limits.turns import SLICE_BYTES, JobTurns
from shmserve.gateway.openai import templates
from shmserve.gateway.openai.errors import BadParameter
from shmserve.gateway.openai.templates import ChatTemplates, TemplateRenderer, template_values
from tests.support.gateway.language_models import ENDLESS
from tests.support.gateway.manual_loop import ManualLoop
from tests.support.gateway.sliced_work import finished, slices_of

pytest.importorskip("jinja2")
ADDRESS = "192.0.2.1"


def render(template: str, messages: list[dict[str, Any]], tools: Any = None, **arguments: Any) -> str:
    values = template_values(messages, tools, arguments, {"bos_token": "<s>", "other": "secret"})
    return finished(ChatTemplates(Budget(1 << 30)).render(ADDRESS, template, values, 0))


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


def test_the_values_in_arguments_of_tool_calls_are_counted_before_they_are_decoded() -> None:
    calls = [{"function": {"name": "f", "arguments": json.dumps([[]] * count)}} for count in (100_000, 31_073)]
    with pytest.raises(BadParameter, match="have 131073 values; the limit is 131072"):
        render("", [{"role": "assistant", "tool_calls": calls}])
    values = template_values([{"role": "assistant", "tool_calls": calls[:1]}], None, {}, {})
    assert values["messages"][0]["tool_calls"] == calls[:1], "not before the size of the messages is checked"
    size = len(calls[0]["function"]["arguments"])
    assert slices_of(templates.with_objects(values)) >= size // SLICE_BYTES


@pytest.mark.parametrize("part", [{"type": "image_url"}, {"type": "text"}, {"type": "text", "text": 1}, "a", None])
def test_parts_that_are_not_text(part: Any) -> None:
    with pytest.raises(BadParameter, match="has a part that is not a text"):
        render("", [{"role": "user", "content": [part]}])


@pytest.mark.parametrize(("template", "kind", "text"), [
    ('{{ raise_exception("not so") }}', InvalidRequest, "refuses the messages: not so"),
    ("{{ messages.__class__.__mro__ }}", InvalidRequest, "access to attribute '__class__'"),
    ("{{ messages.append(1) }}", InvalidRequest, "access to attribute 'append'"),
    ("{{ messages[0].content() }}", InvalidRequest, "not callable"),
    ("{{ missing.thing }}", InvalidRequest, "is undefined"),
    ("{% for i in range(1000000) %}{% endfor %}", InvalidRequest, "Range too big"),
    ("{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}", InvalidRequest, "more than 8388608 char"),
    ("{% include 'x' %}", InvalidRequest, "no loader"),
    ("{% for %}", Unsupported, "chat template of the model is invalid"),
])  # fmt: skip
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
    """As in templates that are not coroutines."""
    messages = [{"role": role} for role in ("user", "system", "user")]
    assert render(ITERATORS, messages) == "True system,user,user 1/2 2/2 1"
    assert render(MACROS, []) == "1,,2,3,,,<210>"


@pytest.mark.parametrize("template", [
    ENDLESS,
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for i in range(99999) %}{{ range(99999) | map('string') | list | length }}{% endfor %}",
])  # fmt: skip
def test_the_time_of_templates_without_text_is_bounded(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.02)
    with pytest.raises(InvalidRequest, match=r"refuses the messages: it takes more than 0\.02 seconds"):
        render(template, [])


@pytest.mark.parametrize(("template", "text"), [
    ("{% for i in range(100) %}{% endfor %}", ""),
    ("{% for i in range(100) if false %}{% endfor %}", ""),
    ("{% for i in range(100) if i % 50 == 0 %}{{ loop.index }}={{ i }};{% else %}none{% endfor %}", "1=0;2=50;"),
    ("{{ range(100) | select('gt', 98) | join }}", "99"),
])  # fmt: skip
def test_a_template_may_pause_at_each_item(template: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even at items that a condition leaves out."""
    monkeypatch.setattr(templates, "SLICE_SECONDS", 0.0)
    found = list[str]()

    def rendering() -> Iterator[None]:
        found.append((yield from TemplateRenderer().render(template, {})))

    assert len(list(rendering())) == 100
    assert found == [text]


CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"


def test_a_template_that_loops_does_not_delay_the_chats_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither chats of another model nor those of another caller are delayed, however many slow ones there are."""
    monkeypatch.setattr(templates, "SLICE_SECONDS", 0.0)  # each iteration is a slice
    loop: Any = ManualLoop()
    turns, found, made = JobTurns(loop), list[str](), ChatTemplates(Budget(1000))
    slow = [
        turns.run(made.render("192.0.2.9", ENDLESS, {}, 1), found.append, failed, ("192.0.2.9", "slow"))
        for _ in range(50)
    ]
    values = {"messages": [{"content": letter} for letter in "abc"]}
    for address, model in (("192.0.2.9", "fast"), (ADDRESS, "fast"), (ADDRESS, "slow")):
        turns.run(made.render(address, CHAT, values, 1), found.append, failed, (address, model))
    for _ in range(4 * 3):  # of the four parties, three have three slices after the first
        loop.iterate()
    assert found == ["abc"] * 3
    assert all(job.running for job in slow)
    for job in slow:
        job.cancel()


def failed(error: Exception) -> None:
    raise error


def test_cancelled_and_failed_templates_release_their_share() -> None:
    budget = Budget(60)
    made = ChatTemplates(budget)
    work = made.render(ADDRESS, ENDLESS, {}, 10)
    next(work)
    assert budget.held == 10
    with pytest.raises(ShareExceeded, match="10 bytes of messages wait for their chat templates; 10 more would exceed"):
        next(made.render(ADDRESS, "a", {}, 10))
    assert finished(made.render("192.0.2.2", "a", {}, 10)) == "a", "the share of another address"
    work.close()
    with pytest.raises(Unsupported):
        finished(made.render(ADDRESS, "{% for %}", {}, 10))
    assert budget.held == 0
    with pytest.raises(BadParameter, match="4194305 bytes of JSON; the limit for a chat template is 4194304"):
        next(made.render("", "", {}, (4 << 20) + 1))
