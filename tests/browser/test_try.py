""" "Try it": the form that the page makes from a model's metadata, how it shows the response, and the code for the same
call, which the tests run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.browser.conftest import Site
from tests.browser.models import LABELS
from tests.support.browser.tab import Tab
from tests.tritonclient.serving import ABSENT, PYTHON

pytestmark = pytest.mark.process

TOP, BOTTOM = (250, 60, 20), (10, 40, 130)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """A picture twice as wide and high as the input of the model `colours`, with other colours in its lower half."""
    pixels = np.empty((64, 48, 3), np.uint8)
    pixels[:32], pixels[32:] = TOP, BOTTOM
    path = tmp_path / "two colours.png"
    Image.fromarray(pixels).save(path)
    return path


def show(tab: Tab, model: str) -> None:
    tab.go(f"#/model/{model}/try")
    tab.wait("document.querySelector('form#try')")


def run(tab: Tab, result: str) -> None:
    """Runs the model, and waits until this kind of result is shown."""
    tab.click("form#try button[type=submit]")
    tab.wait_for(f"#result [data-result={result}]")


def code(tab: Tab, language: str, *parts: str) -> str:
    """The displayed code, once it has these parts."""
    wanted = json.dumps(parts)
    return str(
        tab.wait(
            f"(() => {{ const text = document.querySelector('pre[data-code={language}]').textContent;"
            f"return {wanted}.every((part) => text.includes(part)) && text; }})()"
        )
    )


def execute(command: list[str], folder: Path, site: Site) -> str:
    environment = os.environ | {"SHMSERVE_RUNTIME_DIR": str(site.server.runtime_dir)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


PIXELS = """(() => {
  const canvas = document.querySelector('%s canvas');
  const pixel = (y) => [...canvas.getContext('2d').getImageData(3, y, 1, 1).data].slice(0, 3);
  return [canvas.width, canvas.height, pixel(2), pixel(29)];
})()"""


def shell(tab: Tab, folder: Path, site: Site, *parts: str) -> str:
    """What the displayed commands for curl print."""
    return execute(["bash", "-c", code(tab, "curl", *parts).replace("curl ", "curl -s ")], folder, site)


def test_a_picture_is_classified_and_the_generated_code_returns_the_same(tab: Tab, site: Site, picture: Path) -> None:
    shares = (np.array(TOP, np.float64) + np.array(BOTTOM)) / 2 / 255
    labels = [LABELS[index] for index in np.argsort(shares)[::-1]]
    show(tab, "colours")
    tab.drop_file("fieldset:has(#in-x-file)", picture)
    tab.expect(PIXELS % "form#try", [24, 32, list(TOP), list(BOTTOM)])  # then the button stays in its place
    run(tab, "bars")
    text = tab.text("[data-output=y] [data-result=bars]")
    assert [text.index(label) for label in labels] == sorted(text.index(label) for label in LABELS)
    for share in shares:
        assert str(share)[:5] in text
    printed = execute([sys.executable, "-c", code(tab, "python", picture.name)], picture.parent, site)
    assert [printed.index(label) for label in labels] == sorted(printed.index(label) for label in LABELS)
    code(tab, "curl", "--data-binary @request.bin")
    tab.download("a[download]", picture.parent)
    (found,) = json.loads(shell(tab, picture.parent, site))["outputs"]
    assert [value.split(":")[2] for value in found["data"]] == labels
    numbers = [float(value.split(":")[0]) for value in found["data"]]
    np.testing.assert_allclose(numbers, sorted(shares, reverse=True), atol=2e-3)


def test_an_output_picture_is_drawn(tab: Tab, site: Site, picture: Path) -> None:
    show(tab, "negative")
    tab.choose_file("#in-x-file", picture)
    tab.wait("document.querySelector('[aria-label=width]').checkVisibility()")
    tab.write("[aria-label=width]", "24")
    tab.write("[aria-label=height]", "32")
    tab.expect(PIXELS % "form#try", [24, 32, list(TOP), list(BOTTOM)])
    run(tab, "picture")
    inverted = [[255 - value for value in colour] for colour in (TOP, BOTTOM)]
    tab.expect(PIXELS % "[data-result=picture]", [24, 32, *inverted])


def test_output_numbers_are_shown_as_a_table(tab: Tab, site: Site, tmp_path: Path) -> None:
    show(tab, "numbers")
    tab.write("[data-input=x]", "1.5, -2.25")
    run(tab, "table")
    cells = "[...document.querySelectorAll('[data-output=y] tbody td')].map((cell) => cell.textContent)"
    assert tab.evaluate(cells)[-2:] == ["1.5", "-2.25"]
    if not PYTHON.exists():
        pytest.skip(ABSENT)
    printed = execute([str(PYTHON), "-c", code(tab, "tritonclient", "-2.25")], tmp_path, site)
    assert "-2.25" in printed


def test_strings_are_quoted_correctly_in_the_generated_code(tab: Tab, site: Site, tmp_path: Path) -> None:
    """All kinds of quotes, backslashes and other alphabets, which shells and Python parse differently."""
    words = ["it's", 'a "quoted" \\n', "Größe 大きさ", "$HOME `id` <b>&amp;"]
    show(tab, "words")
    tab.write("[data-input=x]", json.dumps(words))
    run(tab, "table")
    for word in words:
        assert word in tab.text("[data-output=y]")
    (found,) = json.loads(shell(tab, tmp_path, site, "quoted"))["outputs"]
    assert found["data"] == words
    script = (
        code(tab, "python", "quoted")
        + "\n    assert [word.decode() for word in client.infer('words', inputs)['y']] == "
    )
    execute([sys.executable, "-c", script + repr(words)], tmp_path, site)


def test_errors_are_shown_as_text(tab: Tab, site: Site) -> None:
    show(tab, "moody")
    tab.write("[data-input=x]", "-1, 0")
    run(tab, "error")
    tab.wait_for("[data-result=error]", "ValueError: <img id=injected")
    assert tab.evaluate("document.getElementById('injected')") is None
    tab.write("[data-input=x]", "1, 2, 3")
    tab.click("form#try button[type=submit]")
    tab.wait("document.querySelector('#result').innerText.includes('ValueError') === false")
    tab.write("[data-input=x]", "one")
    tab.click("form#try button[type=submit]")
    tab.wait_for("#result [data-result=error]", "x: 'one'")
    tab.expect("document.querySelector('[data-input=x]').ariaInvalid", "true")
    tab.write("[data-input=x]", "1, 2")
    run(tab, "table")


def test_the_generated_code_of_a_stream_returns_each_response(tab: Tab, site: Site, tmp_path: Path) -> None:
    words = ["first", "second", "third"]
    show(tab, "talker")
    tab.write("[data-input=x]", json.dumps(words))
    run(tab, "json")
    tab.wait_for("form#try [role=status]", "answered in")
    shown = tab.evaluate("[...document.querySelectorAll('[data-result=json] li')].map((one) => one.textContent)")
    assert [json.loads(text)["y"] for text in shown] == words
    printed = shell(tab, tmp_path, site, *words)
    events = [json.loads(line.removeprefix("data: ")) for line in printed.splitlines() if line.startswith("data: ")]
    assert [event["y"] for event in events] == words
    printed = execute([sys.executable, "-c", code(tab, "python", *words)], tmp_path, site)
    assert [printed.index(word) for word in words] == sorted(printed.index(word) for word in words)
    tab.write("[data-input=x]", "fail")
    run(tab, "error")
    tab.wait_for("#result", "it was told to fail")
    tab.write("[data-input=x]", json.dumps(words))
    if not PYTHON.exists():
        pytest.skip(ABSENT)
    text = code(tab, "tritonclient", *words).replace(":8001", f":{site.gateway.grpc}")
    printed = execute([str(PYTHON), "-c", text], tmp_path, site)
    assert printed.split() == [f"[b'{word}']" for word in words]


def test_the_copy_button_copies_the_code(tab: Tab, site: Site) -> None:
    tab.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    tab.call("Page.bringToFront")
    show(tab, "numbers")
    tab.write("[data-input=x]", "7, 8")
    for language in ("curl", "python", "tritonclient"):
        text = code(tab, language, "7", "8")
        tab.click(f"[data-copy={language}]")
        tab.wait_for(f"[data-copy={language}]", "opied")
        assert tab.evaluate("navigator.clipboard.readText()") == text
