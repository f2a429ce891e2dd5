"""A model as the server sees it: its text side, its limits, and the loop that answers."""

from __future__ import annotations

from dataclasses import dataclass

from hotset.core.errors import ConfigError
from hotset.runtime.engine import Engine
from hotset.runtime.requests import Scheduling
from hotset.runtime.text import Text
from hotset.server.engine_loop import EngineLoop
from hotset.server.metrics import Metrics
from hotset.server.state import EngineState, State


@dataclass(frozen=True, kw_only=True)
class Served:
    """One model.

    Attributes:
        names: what requests may call it; the first is its own.
        text: tokenizer and chat template.
        vocab: ids of the model.
        context_tokens: longest prompt and answer together.
        stop_ids: ids that end an answer.
        loop: answers; not started yet.
        metrics: of the server.
        state: of the engine.
    """

    names: tuple[str, ...]
    text: Text
    vocab: int
    context_tokens: int
    stop_ids: frozenset[int]
    loop: EngineLoop
    metrics: Metrics
    state: State

    @classmethod
    def of_engine(cls, engine: Engine, scheduler: Scheduling, names: tuple[str, ...]) -> Served:
        """A loaded model, answering by a scheduler of its.

        Raises:
            ConfigError: the checkpoint has no tokenizer.
        """
        if engine.text is None:
            raise ConfigError("the checkpoint has no tokenizer, and a server needs one")
        return cls.of(
            scheduler,
            names=names,
            text=engine.text,
            vocab=engine.geometry.vocab,
            context_tokens=engine.plan.context_tokens,
            stop_ids=engine.stop_ids,
            state=EngineState(engine),
        )

    @classmethod
    def of(
        cls,
        scheduler: Scheduling,
        *,
        names: tuple[str, ...],
        text: Text,
        vocab: int,
        context_tokens: int,
        stop_ids: frozenset[int],
        state: State,
    ) -> Served:
        """Around a scheduler that nobody steps yet."""
        metrics = Metrics(
            names[0],
            context_tokens=context_tokens,
            counts=scheduler.counts,
            figures=state.figures,
        )
        return cls(
            names=names,
            text=text,
            vocab=vocab,
            context_tokens=context_tokens,
            stop_ids=stop_ids,
            loop=EngineLoop(scheduler, observer=metrics.observe),
            metrics=metrics,
            state=state,
        )
