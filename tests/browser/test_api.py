"""The view of the endpoints, which is made from the server's OpenAPI document."""

from __future__ import annotations

import json

import pytest

from tests.browser.conftest import Site
from tests.support.browser.tab import Tab

pytestmark = pytest.mark.process

INFER = "POST /v2/models/{model}/infer"


def opened(tab: Tab, operation: str) -> str:
    """Opens an operation, and returns its selector."""
    selector = f"[data-operation='{operation}']"
    tab.wait_for(selector)
    tab.click(f"{selector} summary")
    tab.wait_for(f"{selector} form")
    return selector


def test_all_endpoints_are_shown_and_can_be_called(tab: Tab, site: Site) -> None:
    tab.open("/docs")
    infer = opened(tab, INFER)
    document = json.loads(site.gateway.ask("GET", "/openapi.json")[1])
    expected = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert "POST /v1/chat/completions" in expected
    shown = "[...document.querySelectorAll('[data-operation]')].map((one) => one.dataset.operation)"
    tab.expect(f"{shown}.sort()", sorted(expected))
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, -2]}
    tab.write(f"{infer} input[name=model]", "numbers")
    tab.write(f"{infer} textarea", json.dumps({"inputs": [tensor]}))
    tab.click(f"{infer} button[type=submit]")
    tab.wait_for(f"{infer} [role=status]", "status 200")
    tab.wait_for(f"{infer} [data-answer]", "}")
    assert json.loads(tab.text(f"{infer} [data-answer]"))["outputs"][0]["data"] == [1.5, -2]
    tab.wait_for(f"{infer} [data-code=curl]", "/v2/models/numbers/infer")
    tab.write(f"{infer} input[name=model]", "a/b")
    tab.click(f"{infer} button[type=submit]")
    tab.wait_for(f"{infer} [role=alert]", "unknown model: 'a/b'")


def test_an_example_and_the_fields_of_a_body_are_shown(tab: Tab) -> None:
    tab.go("#/api")
    chat = opened(tab, "POST /v1/chat/completions")
    example = json.loads(tab.evaluate(f"document.querySelector(`{chat} textarea`).value"))
    assert example == {"model": "", "messages": [{"role": ""}]}
    tab.click(f"{chat} details summary")
    tab.wait_for(f"{chat} details[open] tbody tr", "temperature")
    rows = tab.evaluate(f"[...document.querySelectorAll(`{chat} tbody tr`)].map((one) => one.innerText.split('\\t'))")
    assert ["messages[].role", "string", "yes", ""] in rows
    assert ["temperature", "number", "", "at least 0, at most 2"] in rows
    tab.click(f"{chat} button[type=submit]")
    tab.wait_for(f"{chat} [role=alert]", "status 400: you must provide a model parameter")
