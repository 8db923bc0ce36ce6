"""One page in the browser. A MutationObserver in the page detects what a test waits for.

Errors are collected: exceptions of scripts, violations of the content security policy, and requests to other hosts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.browser.chromium import Chromium, ProtocolError

_WAIT = """
new Promise((resolve) => {
  const look = () => (%s);
  let observer;
  const check = () => {
    let found = null;
    try { found = look(); } catch (error) { if (!(error instanceof TypeError)) throw error; }
    if (found) { observer?.disconnect(); removeEventListener("input", check, true); resolve(found); return true; }
    return false;
  };
  if (check()) return;
  observer = new MutationObserver(check);
  observer.observe(document, {subtree: true, childList: true, attributes: true, characterData: true});
  addEventListener("input", check, true);
  addEventListener("hashchange", check);
})
"""
_KEYS = {
    "Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), " ": (32, " "), "ArrowDown": (40, ""), "ArrowUp": (38, ""),
    "ArrowLeft": (37, ""), "ArrowRight": (39, ""), "Home": (36, ""), "End": (35, ""), "PageDown": (34, ""),
}  # fmt: skip
INTERACTIVE = frozenset(
    ("button", "link", "textbox", "searchbox", "combobox", "checkbox", "radio", "spinbutton", "slider", "tab",
     "listbox", "menuitem", "switch", "image", "img", "table", "grid", "dialog")
)  # fmt: skip
"""Roles of elements that must have a name for a screen reader."""


class Tab:
    """`origin`: the origin of the page, which may send requests only there and to `others`."""

    def __init__(self, browser: Chromium, origin: str, others: Iterable[str] = ()) -> None:
        self._browser = browser
        self.origin = origin
        self._allowed = ("blob:", "data:", "about:", *(f"{one}/" for one in (origin, *others)))
        self._target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)
        self._session: str = attached["sessionId"]
        self.faults: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.questions: list[str] = []
        """The texts that the page has shown with confirm()."""
        self.agrees = True
        """The user's answer to confirm()."""
        self._downloads: list[str] = []
        self.loaded = 0
        """Number of documents loaded so far."""
        browser.listeners[self._session] = self._event
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def _event(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.faults.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and parameters["entry"]["source"] in ("security", "violation", "other"):
            self.faults.append(parameters["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert"):
            self.faults.append(str([argument.get("value") for argument in parameters["args"]]))
        elif method == "Network.requestWillBeSent":
            request = parameters["request"]
            self.requests.append(request)
            if not request["url"].startswith(self._allowed):
                self.faults.append(f"a request to {request['url']}")
        elif method == "Page.javascriptDialogOpening":
            self.questions.append(parameters["message"])
            self._browser.post("Page.handleJavaScriptDialog", self._session, accept=self.agrees)
        elif method == "Browser.downloadProgress" and parameters["state"] != "inProgress":
            self._downloads.append(parameters["state"])
        elif method == "Page.loadEventFired":
            self.loaded += 1

    # ------------------------------------------------------------------------------------ documents

    def open(self, path: str = "/") -> None:
        """Loads the page again, so that no state of an earlier page is left."""
        self._navigate("about:blank")
        self._navigate(self.origin + path)

    def _navigate(self, url: str) -> None:
        before = self.loaded
        found = self.call("Page.navigate", url=url)
        assert "errorText" not in found, found
        self.wait_for_load(before)

    def wait_for_load(self, before: int) -> None:
        """Waits until more than this many documents have been loaded."""
        self._browser.wait(lambda: self.loaded > before, "a document to load")

    def go(self, fragment: str) -> None:
        self.evaluate(f"location.hash = {json.dumps(fragment)}")

    def evaluate(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise AssertionError(details.get("exception", {}).get("description") or details["text"])
        return found["result"].get("value")

    def fetch(self, url: str, **options: Any) -> str:
        """Type and status of the answer that the page sees, or the error that kept it from seeing one."""
        seen = "(answer) => answer.type + ' ' + answer.status"
        return str(self.evaluate(f"fetch({json.dumps(url)}, {json.dumps(options)}).then({seen}, String)"))

    def wait(self, expression: str) -> Any:
        """Waits until the expression is true, and returns its value. The expression is evaluated whenever the document
        changes."""
        try:
            return self.evaluate(_WAIT % expression)
        except TimeoutError as error:
            raise AssertionError(f"never happened: {expression}\n{self.text()}\n{self.faults}") from error

    def text(self, selector: str = "body") -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def wait_for(self, selector: str, text: str = "") -> None:
        found, wanted = json.dumps(selector), json.dumps(text)
        self.wait(f"[...document.querySelectorAll({found})].some((one) => one.textContent.includes({wanted}))")

    def await_fault(self, text: str) -> None:
        self._browser.wait(lambda: any(text in fault for fault in self.faults), f"a fault with '{text}'")

    def expect(self, expression: str, value: Any) -> None:
        wanted = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        self.wait(f"JSON.stringify({expression}) === {json.dumps(wanted)}")

    def expect_text(self, selector: str, text: str) -> None:
        """Waits until this is the whole text of the element."""
        self.expect(f"document.querySelector({json.dumps(selector)})?.textContent", text)

    # ------------------------------------------------------------------------------------ the user

    def click(self, selector: str) -> None:
        """Clicks with the mouse in the middle of the element."""
        self.wait_for(selector)
        place = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def _middle(self, selector: str) -> Any:
        return self.evaluate(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            "one.scrollIntoView({block: 'center', behavior: 'instant'}); const box = one.getBoundingClientRect();"
            "return {x: box.x + box.width / 2, y: box.y + box.height / 2}; })()"
        )

    def press(self, key: str) -> None:
        code, text = _KEYS.get(key, (ord(key.upper()[0]), key))
        parameters: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **parameters, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **parameters)

    def write(self, selector: str, text: str) -> None:
        """Replaces the text of a field."""
        self.wait_for(selector)
        self.evaluate(f"((one) => {{ one.focus(); one.select(); }})(document.querySelector({json.dumps(selector)}))")
        self.call("Input.insertText", text=text)

    def choose_file(self, selector: str, path: Path) -> None:
        node = self.call("DOM.querySelector", nodeId=self.call("DOM.getDocument")["root"]["nodeId"], selector=selector)
        self.call("DOM.setFileInputFiles", nodeId=node["nodeId"], files=[str(path)])

    def download(self, selector: str, folder: Path) -> None:
        """Clicks a link to a file, which is saved under the link's file name."""
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder), eventsEnabled=True)
        before = len(self._downloads)
        self.click(selector)
        self._browser.wait(lambda: len(self._downloads) > before, f"the download of {selector}")
        assert self._downloads[-1] == "completed", self._downloads

    def drop_file(self, selector: str, path: Path) -> None:
        place = self._middle(selector)
        data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, data=data, **place)

    # ------------------------------------------------------------------------------------ appearance

    def size(self, width: int, height: int = 900, mobile: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def scheme(self, name: str) -> None:
        """dark or light."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def accessible(self) -> list[tuple[str, str]]:
        """Role and name of everything in the accessibility tree that is not ignored."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", "").strip())
            for node in nodes
            if not node.get("ignored") and "role" in node
        ]

    def unnamed(self) -> list[str]:
        """Roles of interactive elements without a name."""
        return [role for role, name in self.accessible() if role in INTERACTIVE and not name]

    def close(self) -> None:
        """Closes the tab. Commands in flight in it end."""
        try:
            self._browser.call("Target.closeTarget", targetId=self._target)
        except ProtocolError:
            return  # it has already gone
        finally:
            self._browser.listeners.pop(self._session, None)


@contextmanager
def opened(browser: Chromium, origin: str, others: Iterable[str] = ()) -> Iterator[Tab]:
    """A page that shows the overview. At the end, it must have no errors."""
    tab = Tab(browser, origin, others)
    try:
        tab.size(1280)
        tab.open()
        tab.wait("document.body.dataset.connection === 'live'")
        yield tab
        assert tab.faults == []
    finally:
        tab.close()
