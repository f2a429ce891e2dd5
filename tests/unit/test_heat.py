"""`hotset heat`: use and residency of a replayed trace and of a server's answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from hotset.cli.heat import fetch_heat, heat
from hotset.core.errors import ConfigError, HardwareError
from hotset.core.heat import HeatMap
from hotset.core.trace import load_trace

ANSWER = {
    "steps": 7,
    "layers": [{"use": [3, 1], "resident": [1, 0]}, {"use": [5], "resident": [0]}],
}
app = typer.Typer()
app.command()(heat)


@pytest.fixture
def url() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers["Authorization"] == "Bearer k1"
            answers = {"/hotset/heat": 200, "/keyed/hotset/heat": 200 if known else 401}
            self.send_response(answers.get(self.path, 404))
            self.end_headers()
            self.wfile.write(json.dumps(ANSWER).encode())

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_replayed_trace_keeps_its_slots_full() -> None:
    trace = load_trace("pocket")
    trace = replace(trace, sequences=trace.sequences[:1])
    found = HeatMap.from_trace(trace, slots=0.25, half_life=16.0)
    assert found.use_LE.sum(axis=1) == pytest.approx(1)
    assert found.resident_LE.sum(axis=1) == pytest.approx(8)  # of 32 experts, at every moment
    used_most = np.take_along_axis(found.resident_LE, found.use_LE.argsort(axis=1), axis=1)
    assert used_most[:, -8:].mean() > 2 * used_most[:, :16].mean()


def test_a_servers_answer_is_drawn(url: str, tmp_path: Path) -> None:
    found = fetch_heat(url)
    assert found.use_LE[0].tolist() == [0.75, 0.25]
    assert np.isnan(found.use_LE[1, 1])  # the second layer has one expert
    assert found.resident_LE[0].tolist() == [1, 0]
    picture = tmp_path / "heat.svg"
    result = CliRunner().invoke(app, [url, "-o", str(picture), "--json"])
    assert result.exit_code == 0, result.exception
    assert picture.read_text().startswith("<?xml")
    assert json.loads(result.stdout)["layers"][1] == {"use": [1.0], "resident": [0.0]}


@pytest.mark.parametrize(
    "answer",
    [
        [],
        {},
        {"layers": []},
        {"layers": [{"use": [1]}]},
        {"layers": [{"use": [1], "resident": []}]},
    ],
)
def test_other_answers_are_refused(answer: object) -> None:
    with pytest.raises(ConfigError):
        HeatMap.from_json(answer, name="it")


def test_a_server_that_refuses_is_said(url: str) -> None:
    with pytest.raises(HardwareError, match=r"`.*/x/hotset/heat` refuses: 404 Not Found"):
        fetch_heat(f"{url}/x")


def test_keys_of_a_server(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = [f"{url}/keyed", "--json"]
    refused = CliRunner().invoke(app, ask).exception
    assert isinstance(refused, HardwareError)
    assert "refuses: 401" in refused.message and "HOTSET_API_KEY" in str(refused.hint)
    assert CliRunner().invoke(app, [*ask, "--api-key", "k1"]).exit_code == 0
    monkeypatch.setenv("HOTSET_API_KEY", "k1")
    assert CliRunner().invoke(app, ask).exit_code == 0
    assert CliRunner().invoke(app, [*ask, "--api-key", "k2"]).exit_code != 0


def test_a_server_that_is_not_there_is_said() -> None:
    with pytest.raises(HardwareError, match="does not answer"):
        fetch_heat("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["pocket"], "there is nothing to write"),
        (["http://x", "--slots", "0.5", "--json"], "are a server's own"),
        (["pocket", "-o", "heat.pdf"], "heat.pdf"),
        (["pocket", "--api-key", "k1", "--json"], "`--api-key` is for a server's address"),
        (["pocket", "--slots", "nan", "--json"], "`--slots` is nan"),
        (["pocket", "--half-life", "0", "--json"], "`--half-life` is 0"),
        (["http://x:port", "--json"], "does not answer: nonnumeric port"),
        (["none.npz", "--json"], "there is no trace `none.npz`"),
    ],
)
def test_wrong_requests(args: list[str], message: str) -> None:
    result = CliRunner().invoke(app, args)
    assert message in str(result.exception)
