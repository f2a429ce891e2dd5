"""`hotset verify`: yes for a sound model, and no for each thing that can be wrong with one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from families import Family
from hotset.runtime.engine import Engine
from hotset.runtime.verify import verify as checks
from hotset.runtime.weights import CheckpointWeights
from vocabulary import byte_ids

SHORT = ("--context", "96", "--prefill-chunk", "96")


def flip_a_slot(engine: Engine) -> None:
    layer, expert = engine.store.placement.owner(0)  # type: ignore[misc]
    engine.store.slots.view(0)[100] ^= 1
    assert engine.store.placement.slot_of[layer, expert] == 0


def point_elsewhere(engine: Engine) -> None:
    table = engine.store.table.address
    table[3] = table[3].roll(1)


def double(engine: Engine, name: str, wrong: Callable[..., Any]) -> None:
    """A kernel of a layer that is wrong in the same way wherever experts lie."""
    kernels = engine._runners[1]._kernels

    class Wrong:
        def __getattr__(self, other: str) -> Any:
            return wrong if other == name else getattr(kernels, other)

    engine._runners[1]._kernels = Wrong()  # type: ignore[assignment]


def double_a_sum_of_few(engine: Engine) -> None:
    """What decode and short prompts run."""
    right = engine.kernels.combine
    double(engine, "combine", lambda *args, **kwargs: 2 * right(*args, **kwargs))


def double_a_sum_of_many(engine: Engine) -> None:
    """What long prompts run."""
    right = engine.kernels.add_experts

    def wrong(x_TH: Any, weights_TK: Any, *args: Any, **kwargs: Any) -> None:
        right(x_TH, 2 * weights_TK, *args, **kwargs)

    double(engine, "add_experts", wrong)


def verify(run: Any, model: object, *flags: str) -> tuple[int, dict[str, Any]]:
    done = run("verify", model, "--device", "cpu", *SHORT, *flags, "--json")
    result = json.loads(done.out)
    return done.code, {**result, "by_name": {c["name"]: c for c in result["checks"]}}


def test_a_sound_model(run) -> None:
    code, result = verify(run, "pocket", "--dtype", "float32")
    assert code == 0 and result["ok"] is True
    for name in ("records", "slots", "placements", "perplexity", "repeated token", "stock logits"):
        assert result["by_name"][name]["ok"] is True
        assert any(c.isdigit() for c in result["by_name"][name]["detail"]), "with numbers"
    assert "192 records" in result["by_name"]["records"]["detail"]
    assert "96 slots" in result["by_name"]["slots"]["detail"]


def test_a_damaged_record_in_words(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit in the arena, before slots are filled from it: the two agree with each other, so
    that only the checkpoint can tell."""
    fill = CheckpointWeights.fill_experts

    def filled(self: CheckpointWeights, store: Any, progress: Any) -> None:
        fill(self, store, progress)
        store.arena.record(2, 5)[100] ^= 1

    monkeypatch.setattr(CheckpointWeights, "fill_experts", filled)
    done = run("verify", "pocket", "--device", "cpu", *SHORT)
    assert done.code == 1
    assert done.out.splitlines()[-1] == "NOT verified"
    assert "records: WRONG (1 differ, first: `model.layers.2.mlp.experts" in done.out
    assert "slots: ok (96 slots" in done.out
    assert "slots for half of the experts" in done.err


@pytest.fixture(scope="module")
def sound(chatty: Path) -> set[str]:
    """What is right about the tiny model. Being random, it predicts no better than a guess."""
    source = CheckpointWeights(str(chatty))
    with Family(chatty, source).engine(context_tokens=96, prefill_chunk=96) as engine:
        return {c.name for c in checks(engine, source, byte_ids("hello"), stock=True) if c.ok}


@pytest.mark.parametrize(
    ("fault", "found_by"),
    [
        (flip_a_slot, "slots"),
        (point_elsewhere, "slots"),
        (double_a_sum_of_many, "stock logits"),
        (double_a_sum_of_few, "stock logits, few tokens"),
    ],
)
def test_whatever_is_wrong_is_found(
    run,
    chatty: Path,
    sound: set[str],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Engine], None],
    found_by: str,
) -> None:
    """By the check that is there for it, with exit code 1."""
    make = Engine.__init__

    def broken(self: Engine, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        fault(self)

    monkeypatch.setattr(Engine, "__init__", broken)
    code, result = verify(run, chatty)
    assert found_by in sound
    assert code == 1 and result["ok"] is False
    assert result["by_name"][found_by]["ok"] is False


def test_a_context_that_is_too_short(run, chatty: Path) -> None:
    done = run("verify", chatty, "--device", "cpu", "--context", "16", "--prefill-chunk", "16")
    assert done.code in (1, 2)
    assert "too short" in done.last_words[0] and "--context" in done.last_words[1]
