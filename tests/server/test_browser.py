"""The page in a real browser: what it shows, that it streams and stops, and that all can read it.

Needs playwright and a Chromium of the system; nothing is downloaded.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from clients import NAME, Scripted, serving

from hotset.core.request import FinishReason
from hotset.runtime.text import Text
from hotset.server.config import ServerConfig

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")

WAIT_MS = 10_000
MOVES = re.compile("M")
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
DESK = {"viewport": {"width": 1280, "height": 800}}

# Contrast of every visible text with the ground behind it, by
# https://www.w3.org/TR/WCAG22/#contrast-minimum: those below 4.5. Disabled buttons are exempt.
LOW_CONTRAST = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const rgba = numbers(getComputedStyle(at).backgroundColor);
      if (rgba.length < 4 || rgba[3] === 1) return rgba;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const node of document.querySelectorAll("body *")) {
    const text = [...node.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!text || node.disabled || node.offsetParent === null) continue;
    const [a, b] = [light(numbers(getComputedStyle(node).color)), light(ground(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${node.tagName} ${node.id} ${node.textContent}: ${ratio}`);
  }
  return low;
}"""

# Controls that a screen reader has no name for.
NAMELESS = """() => [
    ...document.querySelectorAll("input, textarea, button, [role=meter], [role=img]")
  ].filter((n) => !(n.labels?.length || n.getAttribute("aria-label") || n.textContent.trim()))
  .map((n) => n.outerHTML)"""

# A fully transparent canvas has drawn nothing.
DRAWN = """() => { const c = document.getElementById("heat");
  const { data } = c.getContext("2d").getImageData(0, 0, c.width, c.height);
  return data.some(Boolean); }"""


def expect(page: Any, selector: str) -> Any:
    return sync_api.expect(page.locator(selector))


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        # Without a sandbox, because that one needs rights which containers often lack.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(chromium: Any, url: str, **options: Any) -> Iterator[Any]:
    """The page, once it shows figures. Errors and requests to elsewhere fail at the end."""
    wrong: list[str] = []
    with chromium.new_context(**options) as context:
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith(url) else wrong.append(r.url))
        page.goto(url)
        yield page
    assert wrong == []


@pytest.fixture
def page(chromium: Any, server: Scripted) -> Iterator[Any]:
    with opened(chromium, server.url, **DESK) as page:
        page.wait_for_selector("#status[data-word=ok]")
        yield page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", [PHONE, DESK], ids=["phone", "desk"])
def test_everyone_can_read_it(
    chromium: Any, server: Scripted, screen: dict[str, Any], scheme: str
) -> None:
    server.say("An answer with averyveryveryveryveryveryveryveryveryveryveryveryverylongword.")
    with opened(chromium, server.url, color_scheme=scheme, **screen) as page:
        page.wait_for_selector("#status[data-word=ok]")
        page.fill("#message", "hello")
        page.press("#message", "Enter")
        page.get_by_text("tokens/s, first after").wait_for()
        wide, inner = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide <= inner, "it has to be scrolled sideways"
        assert page.evaluate(LOW_CONTRAST) == []
        assert page.evaluate(NAMELESS) == []
        assert page.evaluate(DRAWN)
        # Controls: the checks find what is wrong.
        page.evaluate("document.querySelector('h1').style.color = 'grey'")
        page.evaluate("document.querySelector('h1').style.background = 'silver'")
        page.evaluate("document.getElementById('theme').removeAttribute('aria-label')")
        page.evaluate("document.getElementById('theme').textContent = ''")
        assert len(page.evaluate(LOW_CONTRAST)) == len(page.evaluate(NAMELESS)) == 1


def test_figures_come_and_go_on(page: Any, server: Scripted) -> None:
    assert page.inner_text("#model") == NAME
    assert page.inner_text("#hits") == "70.0%"
    before = page.inner_text("#speed-note")
    client = server.openai()
    client.completions.create(model=NAME, prompt="x")
    expect(page, "#speed-note").not_to_have_text(before, timeout=WAIT_MS)
    expect(page, "#speed-chart path >> nth=1").to_have_attribute("d", MOVES, timeout=WAIT_MS)
    assert "1 of 2 experts have a slot" in page.inner_text("#heat-note")
    page.hover("#heat", position={"x": 2, "y": 2})
    assert page.inner_text("#heat-cell") == "Layer 0, expert 0: no slot"


def test_a_conversation_streams(page: Any, server: Scripted) -> None:
    """What is said shows before the answer ends, and goes back with the next message."""
    server.say("Grüße, 😀!")
    server.scheduler.pause_seconds = 0.15
    try:
        page.fill("#message", "one")
        page.click("#send")
        expect(page, ".said.assistant .text").to_contain_text("Gr", timeout=WAIT_MS)
        assert page.is_disabled("#send") and page.is_enabled("#stop")
        assert page.get_by_text("tokens/s, first after").count() == 0
    finally:
        server.scheduler.pause_seconds = 0.0
    page.get_by_text("tokens/s, first after").wait_for()
    assert page.inner_text(".said.assistant .text") == "Grüße, 😀!"
    page.fill("#message", "two")
    page.press("#message", "Enter")
    expect(page, ".said.assistant .note").to_have_count(2, timeout=WAIT_MS)
    prompt = server.served.text.decode(server.scheduler.last.prompt_ids)
    assert prompt.index("one") < prompt.index("Grüße, 😀!") < prompt.index("two")


def test_stop_stops_the_answer_and_not_the_conversation(page: Any, server: Scripted) -> None:
    server.say("x" * 3000)
    server.scheduler.pause_seconds = 0.02
    try:
        page.fill("#message", "go on for long")
        page.click("#send")
        page.get_by_text("xx").wait_for()
        page.click("#stop")
        page.get_by_text("stopped", exact=True).wait_for()
        server.ended()
    finally:
        server.scheduler.pause_seconds = 0.0
    number = server.scheduler.num_submitted
    assert server.scheduler.reasons_of[number] is FinishReason.CANCELLED
    server.say("again")
    page.fill("#message", "and now?")
    page.click("#send")
    page.get_by_text("again").wait_for()


def test_what_an_answer_says_is_never_taken_for_markup(page: Any, server: Scripted) -> None:
    server.say("<img src=x onerror=alert(1)><script>alert(1)</script>")
    page.fill("#message", "<b>bold</b>")
    page.click("#send")
    page.get_by_text("tokens/s, first after").wait_for()
    assert page.locator(".said img, .said script, .said b").count() == 0
    assert page.inner_text(".said.user .text") == "<b>bold</b>"


def test_a_refusal_is_shown(page: Any, server: Scripted) -> None:
    """And is in sight, also below a message that fills the box."""
    page.fill("#message", "long " * 1000)
    page.click("#send")
    page.locator(".failed").wait_for()
    assert "4096" in page.inner_text(".failed")
    left = "(log) => log.scrollHeight - log.scrollTop - log.clientHeight"
    assert abs(page.eval_on_selector("#log", left)) <= 1


def test_a_theme_is_chosen_and_kept(page: Any) -> None:
    def ground() -> str:
        found: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return found

    light = ground()
    page.click("#theme")
    dark = ground()
    page.reload()
    assert light != dark == ground()


def test_a_key_is_asked_for(chromium: Any, byte_text: Text) -> None:
    with (
        serving(byte_text, ServerConfig(port=0, api_keys=("k1",))) as server,
        opened(chromium, server.url, **DESK) as page,
    ):
        page.fill("#key", "k1")
        page.press("#key", "Enter")
        page.wait_for_selector("#status[data-word=ok]")
        page.wait_for_selector("#key-form", state="hidden")
        page.fill("#message", "hi")
        page.click("#send")
        page.get_by_text("Hello").wait_for()


def test_a_server_that_goes_away_is_said(chromium: Any, byte_text: Text) -> None:
    with serving(byte_text) as server, opened(chromium, server.url, **DESK) as page:
        page.wait_for_selector("#status[data-word=ok]")
        server.process.should_exit = True
        page.wait_for_selector("#status[data-word='not reachable']")
        assert page.locator(".stale .figures").count() == 1, "they are not of now"


def test_an_answer_that_is_no_figures_is_not_the_last(page: Any) -> None:
    """What a proxy puts in between while the server starts again."""
    page.route("**/hotset/live", lambda route: route.fulfill(status=502, body="<html>"))
    page.wait_for_selector("#status[data-word='error 502']")
    page.unroute("**/hotset/live")
    page.wait_for_selector("#status[data-word=ok]")
    assert page.locator(".stale").count() == 0
