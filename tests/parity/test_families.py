"""Every architecture against stock transformers: a tiny checkpoint in its published layout.

Six families in every run, the rest under the marker `sweep`. Always logits: random models repeat a
token, so that tokens alone prove nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from families import (
    SIX,
    Family,
    continuation_bound,
    difference,
    make_family,
    rounding_bound,
    stock_logits,
    text,
)
from hotset.core.placement import Placement
from hotset.models.load import load_resident
from hotset.models.seam import ExpertsFunction, bind_experts, experts_modules
from hotset.runtime.engine import Engine
from hotset.runtime.verify import placements
from tiny import TINY_MODEL_TYPES

TYPES = [
    pytest.param(name, marks=() if name in SIX else pytest.mark.sweep) for name in TINY_MODEL_TYPES
]
NUM_TOKENS, NUM_PROMPT, CHUNK = 40, 24, 16


@pytest.mark.parametrize("model_type", TYPES)
def test_architecture(tmp_path: Path, model_type: str) -> None:
    """Logits of a text, any placement, a greedy answer, a text in chunks."""
    family, ids = make_family(model_type, tmp_path), text(NUM_TOKENS)
    stock = family.stock()
    want = stock_logits(stock, ids)
    with family.engine() as engine:
        got = engine.logits(ids)
        assert difference(got, want) <= rounding_bound(family, engine, ids, want)
        assert_invariant(engine, ids, got)
        answer = greedy(engine, ids[:NUM_PROMPT])
        bound = continuation_bound(engine, want)
        after_prompt = stock_logits(stock, ids[:NUM_PROMPT] + answer)[NUM_PROMPT - 1 : -1]
        assert_greedy(answer, after_prompt, bound)
        # Whether stock itself may continue a text in chunks is what `continues_in_chunks` says.
        stock_in_chunks = difference(in_chunks(stock, ids), want) <= bound
        assert stock_in_chunks == engine.geometry.continues_in_chunks
    with family.engine(prefill_chunk=CHUNK) as engine:
        assert difference(engine.logits(ids), want) <= bound
    assert_contract(family)


@pytest.mark.parametrize("model_type", SIX)
def test_sixteen_bits(tmp_path: Path, model_type: str) -> None:
    """As near to stock in FP32 as stock in the same dtype is, and not one bit from itself.

    A rounding of size eps moves a router's choice with a probability of order eps, so logits are
    off by about sqrt(eps) of their spread on average. Stock's own roundings move some of these
    random models by more than that, and ours, which are others, may as well; a model without its
    experts is off by more than both.
    """
    family, ids = make_family(model_type, tmp_path), text(NUM_TOKENS)
    want = stock_logits(family.stock(), ids)
    rounded = stock_logits(family.stock(torch.bfloat16), ids)
    bound = torch.finfo(torch.bfloat16).eps ** 0.5 + relative_rms(rounded, want)
    with family.with_dtype("bfloat16").engine(policy="none") as engine:
        got = engine.logits(ids)
        assert relative_rms(got, want) <= bound
        assert_invariant(engine, ids, got)
        for index, layer in enumerate(engine.geometry.layers):
            for expert in range(layer.num_experts):
                engine.store.arena.record(index, expert).zero_()
        engine.place(Placement(engine.pools))
        off = relative_rms(engine.logits(ids), want)
        assert off > bound, "the control"


def assert_contract(family: Family) -> None:
    """Routers and norms may compute in float32: experts get the model's dtype all the same, packed
    tensors, and as many ids as the geometry says. Kernels rely on it."""
    source, seen = family.source, {}
    model = load_resident(source.config, source.keys, dtype="bfloat16", device=torch.device("cpu"))

    def watch(name: str) -> ExpertsFunction:
        def experts(
            x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
        ) -> torch.Tensor:
            seen[name] = ids_TK.shape[1]
            assert x_TH.dtype == torch.bfloat16
            assert ids_TK.dtype in (torch.int64, torch.int32) and weights_TK.is_floating_point()
            assert ids_TK.shape == weights_TK.shape and len(ids_TK) == len(x_TH) == 7
            assert x_TH.is_contiguous() and ids_TK.is_contiguous() and weights_TK.is_contiguous()
            return torch.zeros_like(x_TH)

        return experts

    for name, module in experts_modules(model).items():
        bind_experts(module, watch(name))
    with torch.inference_mode():
        model(input_ids=torch.tensor([text(7)]), use_cache=True)
    # LF-14: nothing is left a placeholder, non-persistent buffers included.
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert seen == {layer.name: layer.top_k for layer in source.geometry.layers}


def assert_invariant(engine: Engine, ids: list[int], want: torch.Tensor) -> None:
    """Not one bit differs, wherever the experts lie; free slots hold NaN."""
    for name, placement in placements(engine):
        engine.place(placement)
        assert engine.store.audit() == []
        assert torch.equal(engine.logits(ids), want), name


def assert_greedy(answer: list[int], want_TV: torch.Tensor, bound: float) -> None:
    """Each token is stock's most likely one; two that are each off by the bound may change
    places."""
    chosen = want_TV.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert float((want_TV.amax(dim=-1) - chosen).max()) <= 2 * bound


def relative_rms(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).square().mean().sqrt() / want.std())


def greedy(engine: Engine, prompt: list[int]) -> list[int]:
    steps = engine.generate_ids(prompt, max_tokens=8, stop_ids=frozenset())
    return [step.token_id for step in steps]


def in_chunks(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Stock logits of a text fed in chunks."""
    cache, parts = None, []
    for start in range(0, len(ids), CHUNK):
        chunk = torch.tensor([ids[start : start + CHUNK]])
        with torch.inference_mode():
            out = model(input_ids=chunk, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits[0].float())
    return torch.cat(parts)
