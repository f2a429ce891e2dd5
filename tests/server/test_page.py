"""The page's files and what feeds it, over HTTP; `test_browser` opens it in a browser."""

from __future__ import annotations

import re
from typing import Any

import httpx2
import numpy as np
import pytest
from clients import NAME, NoState, Scripted, serving

from hotset.core.request import FinishReason
from hotset.runtime.requests import Counts
from hotset.runtime.routing import Traffic
from hotset.runtime.text import Text
from hotset.server.config import ServerConfig
from hotset.server.live import Live, picture
from hotset.server.metrics import Metrics
from hotset.server.page import _FOLDER
from hotset.server.state import Cells, Figures

FILES = sorted(path.name for path in _FOLDER.iterdir())
SECRET = "aSecretOfMine"


@pytest.mark.parametrize("path", ["", *(f"static/{name}" for name in FILES), "favicon.ico"])
def test_every_file_is_served_and_may_load_nothing_from_elsewhere(
    server: Scripted, path: str
) -> None:
    answer = httpx2.get(f"{server.url}/{path}")
    assert answer.status_code == 200 and answer.content
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    # An address of another place would be refused by the browser, and fail without a network.
    assert set(re.findall(r"https?://[^\s\"')]+", answer.text)) <= {
        "http://www.w3.org/2000/svg",
        "https://html.spec.whatwg.org/multipage/server-sent-events.html:",
    }


@pytest.mark.parametrize("name", ["nope.js", "..%2Fpage.py", "%2e%2e/page.py", ""])
def test_no_other_file_is_served(server: Scripted, name: str) -> None:
    assert httpx2.get(f"{server.url}/static/{name}").status_code == 404


def test_every_file_that_the_page_names_exists() -> None:
    named = set()
    for name in FILES:
        text = (_FOLDER / name).read_text(encoding="utf-8")
        named |= set(re.findall(r'(?:from "\./|"static/)([\w.]+)"', text))
    assert named | {"index.html"} == set(FILES)


def test_live_has_totals_and_nothing_that_was_said(server: Scripted) -> None:
    server.say(SECRET)
    client = server.openai()
    client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": SECRET}])
    answer = httpx2.get(f"{server.url}/hotset/live")
    live = answer.json()
    assert SECRET not in answer.text
    assert live["model"] == NAME and live["status"] == "ok"
    assert live["tokens"]["generated"] >= len(SECRET)
    assert live["requests"]["finished"][FinishReason.STOP.value] >= 1
    assert live["first_tokens"]["num"] >= 1 and live["first_tokens"]["seconds"] > 0
    assert live["experts"] == {"steps": 3, "used": 10, "hits": 7, "fills": 2, "link_bytes": 3000}
    assert live["decode"]["light_seconds"] is None
    assert live["heat"]["layers"] == ["01"]


def test_the_share_of_the_speed_of_light_is_absent_where_no_rates_are_known() -> None:
    def text(light_seconds: float | None, *, decode_seconds: float) -> str:
        return Metrics(
            NAME,
            context_tokens=64,
            counts=lambda: Counts(decode_seconds=decode_seconds),
            figures=lambda: Figures(Traffic(), light_seconds=light_seconds),
        ).text()

    label = f'{{model_name="{NAME}"}}'
    assert f"\nhotset_speed_of_light_ratio{label} 0.75\n" in text(1.5, decode_seconds=2.0)
    assert f"\nhotset_speed_of_light_seconds_total{label} 1.5\n" in text(1.5, decode_seconds=2.0)
    assert "hotset_speed_of_light_ratio" not in text(0.0, decode_seconds=0.0), "no step yet"
    assert "light" not in text(None, decode_seconds=2.0)


def test_the_page_opens_without_a_key_and_its_figures_do_not(byte_text: Text) -> None:
    config = ServerConfig(port=0, api_keys=("k1",))
    with serving(byte_text, config) as server:
        for path, status in {"": 200, "static/page.js": 200, "hotset/live": 401}.items():
            assert httpx2.get(f"{server.url}/{path}").status_code == status, path
        key = {"Authorization": "Bearer k1"}
        assert httpx2.get(f"{server.url}/hotset/live", headers=key).status_code == 200


def test_a_picture_says_who_has_a_slot_and_who_was_used_since() -> None:
    def cells(use: list[int], missed: list[int], resident: list[bool]) -> Cells:
        layers = [np.array([row, row]) for row in (use, missed, resident)]
        return Cells(np.array([4, 3]), *layers)

    earlier = cells([5, 5, 5, 5], [1, 1, 1, 1], [True, True, False, False])
    now = cells([5, 7, 6, 8], [1, 1, 2, 2], [True, True, False, True])
    # In order: slot, unused; slot, hit; no slot, missed; missed, then filled, then hit.
    assert picture(earlier, now) == ["1347", "134"]


class Clocked(NoState):
    """Counts how often it is asked, and each time one more use has happened."""

    num_asked = 0

    def cells(self) -> Cells:
        self.num_asked += 1
        uses = np.array([[self.num_asked, 0]])
        return Cells(np.array([2]), uses, np.zeros_like(uses), np.zeros((1, 2), dtype=bool))


def test_many_readers_cost_no_more_than_one() -> None:
    state, seconds = Clocked(), [100.0]

    def health() -> tuple[int, dict[str, Any]]:
        return 200, {"status": "ok"}

    metrics = Metrics(NAME, context_tokens=64, counts=Counts, figures=state.figures)
    live = Live(
        NAME,
        counts=Counts,
        health=health,
        metrics=metrics,
        state=state,
        clock=lambda: seconds[0],
    )
    start, first = state.num_asked, live.body()
    assert all(live.body() == first for _ in range(50))
    assert state.num_asked == start + 1
    for _ in range(20):  # ten seconds, two answers in each: only those of the window are kept
        seconds[0] += 0.5
        live.body()
    assert state.num_asked == start + 21
    assert len(live._earlier) <= 4
    assert b'"layers":["20"]' in live.body() and b'"seconds":1.0' in live.body()
