"""The views of the page in a real browser, with a server under load: by mouse, keyboard and screen reader. The view of
the endpoints is made from the server's OpenAPI document."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable

import pytest

import shmserve
from tests.browser.conftest import Site
from tests.browser.models import HOSTILE
from tests.support.browser import axe
from tests.support.browser.tab import Tab

pytestmark = pytest.mark.process

MODELS = ["colours", "moody", "negative", "numbers", "pipeline", "talker", "words"]
VIEWS = {
    "overview": "#/",
    "model": "#/model/numbers",
    "configuration": "#/model/numbers/config",
    "ensemble": "#/model/pipeline",
    "try": "#/model/colours/try",
}


def until(tab: Tab, condition: str, act: Callable[[], None]) -> None:
    """Calls `act` until the condition is true in the page."""
    while not tab.evaluate(condition):
        act()


def cell(model: str, column: str) -> str:
    return f"document.querySelector('[data-model={model}] td.{column}').textContent"


NAMES = "[...document.querySelectorAll('[data-model]')].map((row) => row.dataset.model)"
FOCUSED = "document.activeElement.closest('[data-model]')?.dataset.model"


def show(tab: Tab, view: str) -> None:
    tab.go(VIEWS[view])
    tab.wait(
        {
            "overview": "document.body.dataset.view === 'overview' && document.querySelector('[data-model=words]')",
            "model": "document.body.dataset.view === 'model' && document.querySelector('h1').textContent === 'numbers'",
            "configuration": "document.querySelector('main').innerText.includes('dynamic_batching')",
            "ensemble": "document.body.dataset.view === 'ensemble' && document.querySelector('svg[data-graph]')",
            "try": "document.body.dataset.view === 'try' && document.querySelector('form#try')",
        }[view]
    )


def test_the_overview_lists_filters_and_sorts_models(tab: Tab, site: Site) -> None:
    tab.expect(NAMES, MODELS)
    measured = f"parseFloat({cell('numbers', 'requests')}) > 0 && /s$/.test({cell('numbers', 'p99')})"
    until(tab, measured, lambda: site.ask("numbers"))
    tab.expect(cell("words", "p99"), "\N{EN DASH}")
    tab.write("input[type=search]", "PIPE")
    tab.expect(NAMES, ["pipeline"])
    tab.write("input[type=search]", "")
    tab.expect(NAMES, MODELS)
    for direction, order in (("descending", MODELS[::-1]), ("ascending", MODELS)):
        tab.click("th.name button")
        tab.expect("document.querySelector('th.name').ariaSort", direction)
        tab.expect(NAMES, order)


def test_the_page_of_a_model_shows_its_batches_and_instances(tab: Tab, site: Site) -> None:
    show(tab, "model")
    tab.wait_for("table[aria-label=Instances]", "numbers_0_0")
    text = "document.querySelector('main').innerText"
    seen = f"['Gather', 'Compute', '1 row', 'single', 'idle'].filter((part) => {text}.includes(part)).length >= 4"
    until(tab, seen, lambda: site.ask("numbers"))
    tab.go(VIEWS["configuration"])
    tab.wait_for("main", "max_batch_size: 8")
    tab.wait_for("main", "FP32")


def test_changed_files_are_reported_and_reloaded(tab: Tab, site: Site) -> None:
    tab.go("#/model/words")
    tab.wait_for("[data-action=load]", "Reload")
    config = site.repository / "words" / "config.pbtxt"
    config.write_text(config.read_text() + 'metric_tags { key: "a" value: "b" }\n')
    tab.wait("document.querySelector('main').innerText.includes('Changed on disk')")
    use_token(tab, site)
    tab.click("[data-action=load]")
    tab.wait("[...document.querySelectorAll('[role=status]')].some((one) => one.textContent === 'words is loaded.')")
    tab.wait("!document.querySelector('main').innerText.includes('Changed on disk')")
    tab.go("#/model/words/config")
    tab.wait_for(".problem", "metric_tags")
    tab.wait("document.querySelector('.code pre').scrollHeight <= document.querySelector('.code pre').clientHeight")


def test_an_ensemble_is_a_graph_with_times_on_its_edges(tab: Tab, site: Site) -> None:
    show(tab, "ensemble")
    steps = tab.evaluate("[...document.querySelectorAll('[data-step]')].map((one) => one.textContent)")
    assert [step for name in ("numbers", "moody") for step in steps if name in step] == steps
    edges = tab.evaluate("[...document.querySelectorAll('[data-tensor]')].map((one) => one.dataset.tensor)")
    assert sorted(edges) == ["middle", "x", "y"]
    timed = "/\\d .?s/.test(document.querySelector('[data-tensor=middle] .time').textContent)"
    until(tab, timed, lambda: site.ask("pipeline"))
    tab.wait_for("[data-tensor=middle] title", "waits")
    flowing = "document.querySelector('[data-step] .flow, [data-step] .failing')?.textContent.includes('/s')"
    until(tab, flowing, lambda: site.ask("pipeline"))
    with pytest.raises(shmserve.ModelFailed):
        site.ask("pipeline", -1)
    tab.wait("/1 of [\\d,]+ failed/.test(document.querySelector('[data-step=\"1\"] .failing')?.textContent)")
    assert "failed" not in tab.text("[data-step='0']")
    tab.click("[data-step='1']")
    tab.wait("document.querySelector('main h1').textContent === 'moody'")


def test_the_log_of_a_model_is_for_operators(tab: Tab, site: Site) -> None:
    tab.go("#/model/talker/logs")
    tab.wait("document.querySelector('#token-dialog').open")
    assert tab.evaluate("document.querySelectorAll('.log li').length") == 0
    use_token(tab, site)
    tab.wait_for(".log", "INFO")
    tab.write("input[type=search]", "no such text")
    tab.wait("[...document.querySelectorAll('.log li')].every((one) => one.hidden)")
    with site.server.client() as client:
        tab.write("input[type=search]", "")
        shown = tab.evaluate("document.querySelectorAll('.log li').length")
        client.restart("talker")
    tab.wait(f"document.querySelectorAll('.log li').length > {shown}")


def test_failures_appear_on_an_open_model_page(tab: Tab, site: Site) -> None:
    tab.go("#/model/moody")
    tab.wait_for("table[aria-label=Instances]", "moody_0_0")
    for _ in range(3):
        with pytest.raises(shmserve.ModelFailed):
            site.ask("moody", -1)
    tab.wait_for(".error", "MODEL_FAILED")
    tab.wait("/[3-9] times/.test(document.querySelector('.error').textContent)")
    assert "ValueError" not in tab.text("main"), "other callers' errors are for operators"
    use_token(tab, site)
    tab.wait(f"document.querySelector('.error').innerText.includes({json.dumps(HOSTILE)})")
    assert tab.evaluate("document.getElementById('injected')") is None, "an error is text, not markup"
    column = "table[aria-label=Instances] tbody tr:last-child td:nth-last-child(2)"
    process = f"document.querySelector('{column}').textContent"
    before = tab.evaluate(process)
    with contextlib.suppress(shmserve.ServeError):
        site.ask("moody", -2)
    tab.wait_for("#notices", "was restarted")
    assert tab.evaluate(COVERED) == []
    tab.wait(f"/^\\d+$/.test({process}) && {process} !== {json.dumps(before)}")
    tab.wait("document.querySelector('table[aria-label=Instances]').textContent.includes('ready')")
    tab.go("#/")
    tab.wait("document.querySelector('[data-model=moody] .spark .bad').getAttribute('d')")
    tab.wait("[...document.querySelectorAll('.chip')].some((one) => /^Failing [1-9]/.test(one.textContent))")
    tab.wait_for(".events", "moody_0_0 was restarted")


def test_the_timelines_of_slow_and_failed_requests(tab: Tab, site: Site) -> None:
    site.ask("moody", 1)
    with pytest.raises(shmserve.ModelFailed):
        site.ask("moody", -1)
    tab.go("#/model/moody")
    tab.wait("document.querySelectorAll('.journey').length >= 2")
    assert "MODEL_FAILED" in tab.text(".journey summary")
    tab.click(".journey summary")
    tab.wait("document.querySelector('.journey[open] .lanes svg').ariaLabel.startsWith('moody_0_0: queue ')")
    site.ask("moody", 2)
    tab.wait("document.querySelector('.journey[open]')")
    assert not re.search(r"\b(false|null|undefined)\b", tab.text(".journey[open]"))
    site.ask("pipeline")
    tab.go("#/model/pipeline")
    tab.wait_for(".journey summary")
    tab.evaluate("[...document.querySelectorAll('.journey summary')].forEach(one => one.click())")
    steps = (
        "one => one.querySelectorAll('.lanes li').length >= 3"  # a failed request may have only the step that failed
    )
    tab.wait(f"[...document.querySelectorAll('.journey[open]')].some({steps})")
    tab.wait_for(".journey[open] .lanes", "compute")


def use_token(tab: Tab, site: Site) -> None:
    if not tab.evaluate("document.querySelector('#token-dialog').open"):
        tab.click("#access")
    tab.write("#token", site.token)
    tab.press("Enter")
    tab.wait("!document.querySelector('#token-dialog').open")
    tab.wait("document.body.dataset.connection === 'live'")


def test_loading_and_unloading_needs_the_token(tab: Tab, site: Site) -> None:
    tab.go("#/model/negative")
    tab.wait_for("[data-action=unload]", "Unload")
    tab.click("[data-action=unload]")
    tab.wait("document.querySelector('#token-dialog').open")
    assert tab.questions, "unloading is confirmed"
    tab.wait_for("#token-reason", "token")
    assert site.is_ready("negative")
    use_token(tab, site)
    tab.click("[data-action=unload]")
    tab.wait_for("[role=status]", "negative is unloaded.")
    tab.wait_for("[data-action=load]", "Load")
    assert not site.is_ready("negative")
    tab.go("#/")
    tab.wait_for("[data-model=negative]", "NOT LOADED")
    tab.wait_for(".events", "negative 1 NOT LOADED")
    tab.go("#/model/negative")
    tab.click("[data-action=load]")
    tab.wait_for("[role=status]", "negative is loaded.")
    assert site.is_ready("negative")
    assert tab.evaluate("localStorage.length + sessionStorage.length") == 0
    assert tab.evaluate("document.cookie") == ""
    tab.open("/#/model/negative")
    tab.expect_text("#access", "Token")  # forgotten with the page


def test_all_controls_are_reachable_by_keyboard(tab: Tab) -> None:
    tab.expect(NAMES, MODELS)
    tab.press("/")
    tab.wait("document.activeElement.matches('input[type=search]')")
    tab.press("w")
    tab.expect(NAMES, ["words"])
    tab.write("input[type=search]", "")
    tab.expect(NAMES, MODELS)
    tab.press("Escape")
    reached: list[str] = []
    while len(reached) < 60 and tab.evaluate(FOCUSED) != "words":
        tab.press("Tab")
        reached.append(tab.evaluate("document.activeElement.textContent || document.activeElement.tagName"))
    assert tab.evaluate(FOCUSED) == "words", reached
    for key, model in (("ArrowUp", "talker"), ("Home", "colours"), ("ArrowDown", "moody"), ("End", "words")):
        tab.press(key)
        tab.expect(FOCUSED, model)
    tab.press("Home")
    tab.expect(FOCUSED, "colours")
    tab.press("Enter")
    tab.expect_text("main h1", "colours")
    tab.expect("document.activeElement.tagName", "H1")  # a screen reader is told the new view


@pytest.mark.skipif(not axe.FILE.exists(), reason="axe-core is not here: python -m tests.browser downloads it")
@pytest.mark.parametrize("view", VIEWS)
def test_views_are_accessible(tab: Tab, view: str) -> None:
    for scheme in ("light", "dark"):
        tab.scheme(scheme)
        show(tab, view)
        assert axe.findings(tab) == [], scheme
    assert tab.evaluate("document.querySelectorAll('main h1').length") == 1
    ids = tab.evaluate("[...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert len(ids) == len(set(ids))


COVERED = """
[...document.querySelectorAll('header button, header a, main button, main a:not(.events a)')].filter((one) => {
  const {x, y, width, height} = one.getBoundingClientRect();
  const top = document.elementFromPoint(x + width / 2, y + height / 2);
  return width && top && !one.contains(top) && !top.contains(one);
}).map((one) => one.outerHTML.slice(0, 80))
"""
"""Controls on the screen that something covers."""
WIDER = """
[...document.querySelectorAll('body *')].filter((one) => !one.closest('.scroll') && one.getClientRects().length
  && one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.outerHTML.slice(0, 80))
"""
ROW = "(one) => one.getBoundingClientRect().bottom <= 56"
GROUND = "[document.documentElement, document.body].map((one) => getComputedStyle(one).backgroundColor).join()"


@pytest.mark.parametrize(("scheme", "other"), [("light", "dark"), ("dark", "light")])
def test_views_fit_narrow_screens_and_both_color_schemes(tab: Tab, scheme: str, other: str) -> None:
    tab.scheme(scheme)
    grounds = set()
    for width, height in ((360, 740), (1280, 900)):
        tab.size(width, height, mobile=width == 360)
        for view in VIEWS:
            show(tab, view)
            assert tab.evaluate("document.documentElement.scrollWidth") <= width, (view, tab.evaluate(WIDER))
            assert tab.evaluate(COVERED) == []
            assert tab.evaluate(f"[...document.querySelectorAll('header > *')].every({ROW})"), "one row of controls"
            assert tab.evaluate(
                "[...document.querySelectorAll('[data-graph]')].every((one) => one.getScreenCTM().a > 0.8)"
            )
            grounds.add(tab.evaluate(GROUND))
    assert len(grounds) == 1
    tab.scheme(other)
    assert tab.evaluate(GROUND) not in grounds


def test_a_model_prints_in_full_and_in_light_colours(tab: Tab) -> None:
    tab.scheme("light")
    tab.size(700)  # of A4
    show(tab, "ensemble")
    accent = "getComputedStyle(document.querySelector('.line.accent')).stroke"
    light = tab.evaluate(accent)
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    tab.call("Emulation.setEmulatedMedia", media="print", features=features)
    assert (tab.evaluate(accent), tab.evaluate(GROUND).count("rgb(255, 255, 255)")) == (light, 1)
    hidden = "[...document.querySelectorAll('header, .tabs, .head button')].every((one) => !one.offsetParent)"
    assert tab.evaluate(hidden), "controls are not printed"
    graph = "document.querySelector('[data-graph]')"
    tab.wait(f"{graph}.getBoundingClientRect().right <= {graph}.closest('.panel').getBoundingClientRect().right")
    tab.call("Emulation.setEmulatedMedia", media="")


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
