"""Parts of `verify` by themselves: the stock model, texts that are too short, words for results."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from checkpoints import rewrite
from families import make_family
from hotset.cli.main import app
from hotset.core.errors import ConfigError, RequestError
from hotset.runtime.verify import compare_answer, require_text, stock_model


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "qwen3_vl_moe"])
def test_stock_of_shards_without_an_index(tmp_path: Path, model_type: str) -> None:
    """The same as what the library loads from the folder by itself."""
    family = make_family(model_type, tmp_path)
    want = family.stock().state_dict()
    rewrite(tmp_path, lambda tensors: tensors, num_shards=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    again = family.with_dtype("float32")
    got = stock_model(again.source).state_dict()
    loaded = [name for name in got if "visual" not in name]  # a text forward never reads a tower
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in loaded)
    assert not torch.equal(got[loaded[0]], want[loaded[0]] + 1)


@pytest.mark.parametrize("ids", [[], [1]])
def test_a_text_of_one_token_is_refused(ids: list[int]) -> None:
    with pytest.raises(RequestError, match="at least 2 are needed") as caught:
        require_text(ids, "`--text short.txt`")
    assert caught.value.message.startswith("`--text short.txt` has ")
    require_text([1, 2])


def test_the_command_refuses_it_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("hotset.runtime.engine.Engine.__init__", load)
    file = tmp_path / "short.txt"
    file.write_text("a")
    result = CliRunner().invoke(app, ["verify", "pocket", "--device", "cpu", "--text", str(file)])
    assert isinstance(result.exception, ConfigError)  # exit code 2: 1 is a wrong model's
    assert result.exception.message.startswith(f"`--text {file}` has 1 tokens")


def test_a_greedy_answer_that_is_stocks_is_right_in_any_dtype() -> None:
    logits_TV = torch.eye(3)
    engine: Any = SimpleNamespace(geometry=SimpleNamespace(dtype="bfloat16"))
    same = compare_answer(engine, [0, 1, 2], logits_TV)
    assert (same.ok, same.detail) == (True, "3 of 3 greedy tokens are stock's")
    other = compare_answer(engine, [0, 1, 0], logits_TV)
    assert other.ok is None
    assert other.detail.startswith("2 of 3")
