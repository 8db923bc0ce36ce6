"""What a hostile page can do to the server through a user's browser. Uses a real browser, and a web server with pages
of other origins."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.browser.conftest import EVIL, Site
from tests.support.browser.chromium import Chromium
from tests.support.browser.tab import Tab

pytestmark = pytest.mark.process

JSON = {"Content-Type": "application/json"}
UNLOAD = "/v2/repository/models/words/unload"
INFER = "/v2/models/numbers/infer"
REQUEST = json.dumps({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]})


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a web server with a hostile page. It is a separate process, because browsers open connections in
    advance."""
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"]
    folder = tmp_path_factory.mktemp("evil")
    (folder / "index.html").write_text("<!doctype html><title>evil</title>")
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        found = re.search(r"port (\d+)", server.stdout.readline())
        assert found is not None
        yield int(found[1])
        server.kill()


@pytest.fixture
def page(browser: Chromium) -> Iterator[Tab]:
    """A page whose errors are expected."""
    tab = Tab(browser, "")
    yield tab
    tab.close()


def successes(site: Site) -> int:
    with site.server.client() as client:
        (found,) = client.statistics("numbers")["model_stats"]
        return int(found["inference_stats"]["success"]["count"])


@pytest.mark.parametrize("name", [EVIL, "localhost"])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/json"])
def test_a_page_of_another_origin_cannot_send_requests(page: Tab, site: Site, evil: int, name: str, kind: str) -> None:
    """This includes a page on another port of the same host, which browsers treat as the same site."""
    page.open(f"http://{name}:{evil}/")
    before = successes(site)
    for mode in ("no-cors", "cors"):
        for path, body in ((INFER, REQUEST), (UNLOAD, "{}")):
            found = page.fetch(site.origin + path, method="POST", mode=mode, body=body, headers={"Content-Type": kind})
            assert found in ("opaque 0", "TypeError: Failed to fetch"), (path, mode)
        for path in ("/page/events", "/page/model/numbers", "/v2/models/stats", "/"):
            found = page.fetch(site.origin + path, mode=mode)
            assert found in ("opaque 0", "TypeError: Failed to fetch"), (path, mode)
    assert successes(site) == before
    assert site.is_ready("words")


def test_requests_after_dns_rebinding_are_refused(page: Tab, site: Site) -> None:
    """The browser treats the server as the page's own origin, and would show all responses to the page."""
    rebound = f"http://{EVIL}:{site.gateway.http}"
    for path in ("/", "/page/app.js", "/v2", "/v2/models/numbers/config"):
        page.open(rebound + path)
        assert f"may not reach this endpoint by the name '{EVIL}" in page.text(), path
    before = successes(site)
    for method, path, body in (
        ("GET", "/page/events", None),
        ("GET", "/v2/models/stats", None),
        ("POST", "/v2/repository/index", "{}"),
        ("POST", INFER, REQUEST),
        ("POST", UNLOAD, "{}"),
    ):
        hidden = {"Accept-Language": "*", "User-Agent": "program"}
        for more in ({"headers": JSON}, {"headers": hidden, "referrerPolicy": "no-referrer"}):
            assert page.fetch(rebound + path, method=method, body=body, **more) == "basic 403", path
    assert successes(site) == before
    assert site.is_ready("words")


def test_the_page_cannot_be_framed(page: Tab, site: Site, evil: int) -> None:
    page.open(f"http://{EVIL}:{evil}/")
    page.evaluate(
        "new Promise((resolve) => { const frame = document.createElement('iframe'); frame.onload = resolve;"
        f"frame.src = {json.dumps(site.origin + '/')}; document.body.append(frame); }})"
    )
    page.await_fault("frame-ancestors")
    assert page.evaluate("window.frames[0].length") == 0


def test_the_content_security_policy_blocks_injected_code(page: Tab, site: Site) -> None:
    page.open(site.origin + "/")
    for hostile, directive in (
        ("document.createElement('script').text = 'window.ran = 1'", "trusted-types"),
        ("document.body.innerHTML = '<b>'", "trusted-types"),
        ("document.body.setAttribute('onclick', 'window.ran = 1')", "trusted-types"),
        ("eval('window.ran = 1')", "trusted-types"),
        ("document.body.setAttribute('style', 'display: none')", "style-src"),
        (f"fetch('http://{EVIL}/')", "connect-src"),
        (f"document.body.append(Object.assign(new Image(), {{src: 'http://{EVIL}/x.png'}}))", "img-src"),
        ("document.body.append(Object.assign(document.createElement('iframe'), {src: '/'}))", "frame-src"),
        ("document.createElement('object').data = '/'", "trusted-types"),
    ):
        violated = page.evaluate(
            "new Promise((resolve) => { addEventListener('securitypolicyviolation', "
            "(event) => resolve(event.effectiveDirective), {once: true});"
            f"setTimeout(() => {{ try {{ Promise.resolve({hostile}).catch(() => 0); }} catch {{}} }}); }})"
        )
        assert directive in violated, hostile
    assert page.evaluate("window.ran") is None
