"""Wrong requests to the model in the package: from Python one typed error, on the command line one
message and exit code, both before weights are read or a step runs."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hotset
from hotset.cli.main import main
from hotset.core.errors import ConfigError, RequestError
from hotset.runtime.weights import CheckpointWeights

CPU = ("--device", "cpu", "--context", "64")


@pytest.fixture(scope="module")
def model() -> Iterator[hotset.Model]:
    with hotset.load("pocket", device="cpu", context=64) as loaded:
        yield loaded


@pytest.mark.parametrize(
    ("request_", "part"),
    [
        ({"prompt": 3}, "the prompt is of type `int`"),
        ({"prompt": b"x"}, "the prompt is of type `bytes`"),
        ({"prompt": "a\udcff"}, "character 2 is a lone surrogate"),
        ({"prompt": ""}, "the prompt has no tokens"),
        ({}, "0 of `prompt`"),
        ({"token_ids": 3}, "`token_ids` is 3"),
        ({"token_ids": "12"}, "`token_ids` is '12'"),
        ({"token_ids": [1.5]}, "`token_ids` must be whole numbers"),
        ({"token_ids": torch.tensor([[1, 2]])}, "`token_ids` must be whole numbers"),
        ({"token_ids": torch.tensor([0.5])}, "`token_ids` must be whole numbers"),
        ({"token_ids": []}, "the prompt has no tokens"),
        ({"token_ids": [10**9]}, "outside the vocabulary"),
        ({"messages": "hi"}, "`messages` is of type `str`"),
        ({"messages": [3]}, "message 1 is 3"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "message 1 is not valid text"),
        ({"prompt": "a", "stop_ids": 5}, "`stop_ids` is 5"),
        ({"prompt": "a", "stop_ids": {"x"}}, "`stop_ids` must be whole numbers"),
        ({"prompt": "a", "temperature": "x"}, "`temperature` is 'x'"),
        ({"prompt": "a", "max_tokens": True}, "`max_tokens` is True"),
        ({"prompt": "a", "max_tokens": 64}, "do not fit the context of 64"),
        ({"prompt": "word " * 999}, "do not fit the context of 64"),
    ],
)
def test_a_wrong_request_is_refused_where_it_is_made(
    model: hotset.Model, request_: dict[str, Any], part: str
) -> None:
    with pytest.raises(RequestError, match=part):
        model.generate(**request_)  # not iterated: refused before anything runs


def test_ids_may_come_in_a_tensor_and_stop_ids_in_any_set(model: hotset.Model) -> None:
    ids = model.text.encode("Once upon a time")
    expected = [t.token_id for t in model.generate(token_ids=ids, max_tokens=4, stop_ids=[])]
    given = model.generate(token_ids=torch.tensor(ids), max_tokens=4, stop_ids=set())
    assert [token.token_id for token in given] == expected
    stopped = model.generate(token_ids=ids, max_tokens=4, stop_ids={expected[0]})
    assert [token.token_id for token in stopped] == expected[:1]


@pytest.mark.parametrize("name", [None, 3])
def test_load_wants_a_name(name: Any) -> None:
    with pytest.raises(ConfigError, match="`model` is"):
        hotset.load(name)


def run(*args: str) -> int:
    """Exit code of a command line."""
    with pytest.raises(SystemExit) as end:
        main(["generate", "pocket", *args, *CPU])
    return int(end.value.code or 0)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(CheckpointWeights, "fill_experts", fail)
    monkeypatch.setattr(CheckpointWeights, "load_resident", fail)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("a", "--temperature", "nan"), 2, "`--temperature` is nan"),
        (("a", "--top-p", "0"), 2, "`--top-p` is 0.0"),
        (("a", "--top-k", "-1"), 2, "`--top-k` is -1"),
        (("a", "--min-p", "2"), 2, "`--min-p` is 2.0"),
        (("a", "--seed", "-1"), 2, "`--seed` is -1"),
        (("a", "--max-tokens", "0"), 2, "`--max-tokens` is 0"),
        (("a", "--prefill-chunk", str(10**23)), 2, "`--prefill-chunk` is 1"),
        (("a", "--dtype", "bf16"), 2, "did you mean `bfloat16`"),
        (("",), 2, "the prompt has no tokens"),
        (("a\udcff",), 2, "lone surrogate"),
        (("word " * 999,), 2, "do not fit the context of 64"),
        (("a", "--max-tokens", "64"), 2, "lower `--max-tokens`, or raise `--context`"),
        (("a", "--logit-bias", "99999=1"), 2, "`--logit-bias` has token id 99999"),
        (("a", "--record", "none/trace"), 2, "`--record none/trace` cannot be written"),
        ((), 2, "give either a prompt or `--prompt-file`"),
        (("--prompt-file", "none.txt"), 2, "`--prompt-file none.txt` cannot be read"),
    ],
)
def test_the_command_line_refuses_before_weights_are_read(
    capfd: pytest.CaptureFixture[str], args: tuple[str, ...], code: int, message: str
) -> None:
    assert run(*args) == code
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ") and message in shown.err
    assert "bug in hotset" not in shown.err and "longer than" not in shown.err


def test_the_check_above_can_fail(no_weights: None, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("a") == 1
    assert "weights are read" in capfd.readouterr().err


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("stdin", [None, io.TextIOWrapper(io.BytesIO(b"\xff"))])
def test_stdin_without_text_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], stdin: Any
) -> None:
    monkeypatch.setattr("sys.stdin", stdin)
    assert run("--prompt-file", "-") == 2
    assert "error: `--prompt-file -`" in capfd.readouterr().err


def test_an_answer_fills_what_a_small_context_leaves(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The default of `--max-tokens` is more than this context."""
    file = tmp_path / "prompt.txt"
    file.write_text("Once upon a time", encoding="utf-8")
    assert run("--prompt-file", str(file), "--json") == 0
    assert '"finish_reason"' in capfd.readouterr().out


def test_what_was_not_measured_is_not_given_a_number(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("Once upon a time", "--max-tokens", "1") == 0
    shown = capfd.readouterr().err
    assert "1 token at n/a tokens/s" in shown and "hit rate n/a" in shown
