"""Recording a whole model: prompts and decoded tokens, bound to the model by its routers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from families import Family, Pocket, make_family, open_pocket, text
from hotset.core.trace import TraceInfo, load_trace
from hotset.models.fingerprint import model_fingerprint, router_tensors
from hotset.models.seam import class_config, experts_modules, model_class
from hotset.runtime.engine import Engine
from hotset.runtime.recorder import RoutingRecorder, recording
from tiny import TINY_MODEL_TYPES, tiny_config

PROMPT, NUM_TOKENS = 20, 6


@pytest.fixture(scope="module")
def pocket() -> Pocket:
    return open_pocket()


@pytest.fixture(scope="module")
def chunked(pocket: Pocket) -> Engine:
    """With prompts in several forwards, some of them short enough to fill slots."""
    with pocket.engine(prefill_chunk=12) as engine:
        yield engine


def stock_routing(family: Pocket, ids: list[int]) -> np.ndarray:
    """[T, L, K] by stock transformers' own router logits, ids of a token sorted."""
    with torch.inference_mode():
        out = family.stock_model(torch.tensor([ids]), output_router_logits=True)
    k = family.source.geometry.layers[0].top_k
    chosen = [logits.topk(k, dim=-1).indices.sort(dim=-1).values for logits in out.router_logits]
    return torch.stack(chosen, dim=1).numpy()


def test_what_is_recorded_is_what_stock_routes(
    pocket: Pocket, chunked: Engine, tmp_path: Path
) -> None:
    info = TraceInfo(model_fingerprint(chunked.geometry, chunked.model))
    recorder = RoutingRecorder(tmp_path / "a.trace", info)
    with recording(chunked.steps, recorder):
        answer = list(chunked.generate_ids(pocket.ids[:PROMPT], max_tokens=NUM_TOKENS))
        list(chunked.generate_ids(pocket.ids[:3], max_tokens=1))
    list(chunked.generate_ids(pocket.ids[:9], max_tokens=2))  # after the recording
    trace = load_trace(tmp_path / "a.trace")
    # The last token of an answer is drawn and never taken in.
    assert [s.num_tokens for s in trace.sequences] == [PROMPT + NUM_TOKENS - 1, 3]
    ids = [*pocket.ids[:PROMPT], *(token.token_id for token in answer[:-1])]
    found = np.sort(next(iter(trace)), axis=2)
    assert np.array_equal(found, stock_routing(pocket, ids))
    # The control: one other token in the text routes otherwise.
    ids[5] += 1
    assert not np.array_equal(found, stock_routing(pocket, ids))


def test_an_answer_that_stops_early_has_no_tokens_behind_its_end(
    pocket: Pocket, chunked: Engine, tmp_path: Path
) -> None:
    greedy = [t.token_id for t in chunked.generate_ids(pocket.ids[:PROMPT], max_tokens=NUM_TOKENS)]
    info = TraceInfo(model_fingerprint(chunked.geometry, chunked.model))
    with recording(chunked.steps, RoutingRecorder(tmp_path / "a.trace", info)):
        stop = frozenset({greedy[2]})
        answer = list(chunked.generate_ids(pocket.ids[:PROMPT], max_tokens=9, stop_ids=stop))
    (sequence,) = load_trace(tmp_path / "a.trace").sequences
    assert sequence.num_tokens == PROMPT + len(answer) - 1


def test_a_model_in_the_librarys_cache_is_recorded_too(tmp_path: Path) -> None:
    family = make_family("minimax", tmp_path / "model")
    with family.engine() as engine:
        assert engine.decoding is None
        info = TraceInfo(model_fingerprint(engine.geometry, engine.model))
        with recording(engine.steps, RoutingRecorder(tmp_path / "a.trace", info)):
            list(engine.generate_ids(text(7), max_tokens=4))
    (sequence,) = load_trace(tmp_path / "a.trace").sequences
    assert sequence.num_tokens == 7 + 4 - 1


@pytest.mark.parametrize("model_type", TINY_MODEL_TYPES)
def test_every_family_has_router_weights_in_its_hash(model_type: str) -> None:
    config = tiny_config(model_type)
    stock = model_class(config)
    with torch.device("meta"):
        model = stock(class_config(stock, config))
    modules = experts_modules(model)
    assert modules
    for name in modules:
        found = list(router_tensors(model, name, 0))
        assert any(tensor.ndim == 2 for _, tensor in found), name


def test_the_hash_is_of_the_routers_alone(pocket: Pocket) -> None:
    geometry, model = pocket.source.geometry, pocket.source.load_resident(torch.device("cpu"))
    plain = model_fingerprint(geometry, model)
    assert model_fingerprint(geometry, model.to(torch.bfloat16)) == plain
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1)
        assert model_fingerprint(geometry, model) == plain
        next(router_tensors(model, geometry.layers[1].name, 0))[1].view(-1)[3].neg_()
    assert plain.differences(model_fingerprint(geometry, model)) == [
        f"router weights {plain.router_hash[:12]} against "
        f"{model_fingerprint(geometry, model).router_hash[:12]}"
    ]


def test_two_checkpoints_of_one_shape_differ(tmp_path: Path) -> None:
    hashes = set()
    for seed in (0, 1):
        family: Family = make_family("mixtral", tmp_path / str(seed), seed=seed)
        model = family.source.load_resident(torch.device("cpu"))
        hashes.add(model_fingerprint(family.source.geometry, model).router_hash)
    assert len(hashes) == 2 and "" not in hashes
