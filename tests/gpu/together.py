"""Several prompts answered together by an engine on the GPU, for tests of what its rows keep."""

from __future__ import annotations

from collections.abc import Sequence

from families import Family, text
from hotset.core.config import EngineConfig
from hotset.core.units import GIB
from hotset.runtime.engine import Engine
from hotset.runtime.requests import Request
from scheduling import Answers


def answers(
    family: Family, lengths: Sequence[int], *, num_tokens: int, **options: object
) -> list[list[int]]:
    """Greedy tokens for random prompts of these lengths.

    Args:
        options: of `EngineConfig`.
    """
    sizes = {"vram_bytes": 4 * GIB, "context_tokens": 256, "max_batch": len(lengths)}
    config = EngineConfig(model=str(family.folder), device="cuda", **{**sizes, **options})  # type: ignore[arg-type]
    with Engine(family.source, config) as engine:
        assert engine.decoding is not None, engine.geometry.attention_reason
        got = Answers()
        with engine.scheduling(max_waiting=len(lengths)) as scheduler:
            numbers = [
                scheduler.submit(Request(prompt_ids=text(n, seed=n), max_tokens=num_tokens))
                for n in lengths
            ]
            got.run(scheduler)
        assert not got.errors, got.errors
        assert engine.store.audit() == []
    return [got.tokens[number] for number in numbers]
