"""How a decode step is made when a part of it cannot be: said, weaker, or refused."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest
import torch
from routing import make_trace

from hotset.core.config import EngineConfig
from hotset.core.errors import HardwareError
from hotset.core.policy import DEFAULT_HALF_LIFE, HalfLife
from hotset.core.profile import PolicyReplay, Profile
from hotset.models.compiled import CompiledLayers, end_compilers
from hotset.runtime.decode import DecodeOptions, DecodeStep
from hotset.runtime.decoding import (
    choose_policy,
    first_that_works,
    warn_of_library_cache,
    weaker_options,
)
from hotset.runtime.policies import policy_for

ASKED = DecodeOptions(graph=True, layers=cast(CompiledLayers, object()))


class Maker:
    """Makes a step (a string here) unless the options have a part that is broken."""

    def __init__(self, *broken: str, error: type[Exception] = RuntimeError) -> None:
        self.broken, self.error = broken, error
        self.tried: list[str] = []

    def __call__(self, *, options: DecodeOptions) -> Any:
        self.tried.append(str(options))
        for part in self.broken:
            if part in str(options):
                raise self.error(f"{part} is broken\nand more lines")
        return f"a step with {options}"


def make(maker: Maker, *, strict: bool = False) -> tuple[DecodeOptions, DecodeStep]:
    return first_that_works(maker, weaker_options(ASKED), strict=strict)


def test_what_works_is_made_as_asked(caplog: pytest.LogCaptureFixture) -> None:
    maker = Maker()
    assert make(maker)[0] == ASKED
    assert maker.tried == ["a CUDA graph and fused layers"] and not caplog.records


def test_no_process_that_compiled_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """FT-02: they would outlive a server that is killed. Started here as the compiler starts them,
    without anything to compile."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    end_compilers()  # an earlier test's: while they are there, none is started
    monkeypatch.setattr(config, "compile_threads", 2)  # with one core there would be none
    me = psutil.Process()
    before = set(me.children(recursive=True))
    AsyncCompile.warm_pool()
    started = set(me.children(recursive=True)) - before
    assert started, "the control"
    end_compilers()
    assert not started & set(me.children(recursive=True))
    end_compilers()  # nothing to end is no error


def test_fusing_that_fails_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        options, step = make(Maker("fused"))
    assert options == DecodeOptions(graph=True, layers=None) and "a CUDA graph" in str(step)
    assert caplog.messages == [
        "the decode step cannot be made with a CUDA graph and fused layers: fused is broken; "
        "decoding goes on with a CUDA graph"
    ]


def test_capturing_that_fails_is_left_out_too(caplog: pytest.LogCaptureFixture) -> None:
    options, _ = make(Maker("graph", error=torch._dynamo.exc.FailOnRecompileLimitHit))
    assert options == DecodeOptions(graph=False, layers=None) and len(caplog.records) == 2


def test_a_strict_engine_refuses_the_first_failure() -> None:
    maker = Maker("fused")
    with pytest.raises(HardwareError, match="fused is broken") as caught:
        make(maker, strict=True)
    assert "--no-compiled" in str(caught.value.hint) and len(maker.tried) == 1


def test_nothing_works() -> None:
    with pytest.raises(HardwareError, match="with plain launches: launches is broken"):
        make(Maker("graph", "launches"))


def test_out_of_memory_is_not_a_reason_to_try_more() -> None:
    maker = Maker("graph", error=torch.OutOfMemoryError)
    with pytest.raises(torch.OutOfMemoryError):
        make(maker)
    assert len(maker.tried) == 1


def test_half_life_is_the_users_or_the_profiles_or_the_policys() -> None:
    ids = np.arange(12, dtype=np.uint8).reshape(12, 1, 1) % 8
    counted = Profile.from_trace(make_trace([ids], num_experts=8))
    profile = replace(counted, replay=PolicyReplay(64.0, (0.0, 1.0), (0.0, 1.0)))

    def half_life(own: float | None, known: Profile | None) -> float:
        policy = policy_for([8], num_slots=3, half_life=own, profile=known)
        assert isinstance(policy, HalfLife)
        return policy.half_life_L[0]

    assert half_life(None, profile) == 64.0
    assert half_life(4.0, profile) == 4.0
    assert half_life(None, None) == half_life(None, counted) == DEFAULT_HALF_LIFE
    # Others have none, whatever the profile says.
    assert policy_for([8], num_slots=3, name="lru", profile=profile).name == "lru"


@pytest.mark.parametrize(
    ("num_slots", "policy", "said"),
    [
        (0, "lru", ["`--policy lru` has nothing to move: there are no slots"]),
        (8, "half-life", ["`--policy half-life` has nothing to move: every expert has a slot"]),
        (3, "lru", []),
        (0, "none", []),
        (0, None, []),
    ],
)
def test_a_policy_that_can_do_nothing_is_said(
    caplog: pytest.LogCaptureFixture, num_slots: int, policy: str | None, said: list[str]
) -> None:
    geometry: Any = SimpleNamespace(num_records=8, layers=[SimpleNamespace(num_experts=8)])
    plan: Any = SimpleNamespace(num_slots=num_slots)
    chosen = choose_policy(geometry, plan, EngineConfig(model="pocket", policy=policy))
    assert chosen.name == (policy or "none") and caplog.messages == said


def test_what_the_librarys_cache_costs_is_said(caplog: pytest.LogCaptureFixture) -> None:
    plan: Any = SimpleNamespace(prefill_chunk=2048)
    warn_of_library_cache("it has an indexer", plan, torch.device("cpu"), strict=True)
    assert caplog.messages == []
    warn_of_library_cache("it has an indexer", plan, torch.device("cuda"), strict=False)
    (said,) = caplog.messages
    assert "each 2048 tokens of a prompt bring the experts that they miss anew" in said
    assert "it has an indexer" in said and "`--prefill-chunk`" in said
    with pytest.raises(HardwareError, match="it has an indexer"):
        warn_of_library_cache("it has an indexer", plan, torch.device("cuda"), strict=True)
