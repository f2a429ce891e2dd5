"""Records of a rank against the checkpoint's files, without vLLM: parts are taken here by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hotset.checkpoint.loader import load_experts
from hotset.core.geometry import ExpertSpec, MoELayer
from hotset.integrations.vllm.audit import audit_files
from hotset.integrations.vllm.config import PluginConfig
from hotset.integrations.vllm.model import ModelExperts
from hotset.runtime.weights import CheckpointFiles

Whole = dict[tuple[int, int], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def checkpoint() -> CheckpointFiles:
    return CheckpointFiles("pocket", dtype="float32")


@pytest.fixture(scope="module")
def whole(checkpoint: CheckpointFiles) -> Whole:
    """Every expert's tensors, (layer, expert) -> field -> tensor, as hotset's loader reads them."""
    records = {
        (index, expert): {
            field.name: torch.empty(field.shape, dtype=getattr(torch, field.dtype))
            for field in layer.expert.layout.fields
        }
        for index, layer in enumerate(checkpoint.geometry.layers)
        for expert in range(layer.num_experts)
    }
    load_experts(
        checkpoint.keys,
        destination=lambda layer, expert: records[layer, expert],
        progress=lambda done, total: None,
    )
    return records


def rank_of(
    checkpoint: CheckpointFiles, whole: Whole, *, rank: int, num_ranks: int
) -> ModelExperts:
    """What a rank's process holds when vLLM has loaded it."""
    model = ModelExperts(PluginConfig(vram_bytes=0), torch.device("cpu"))
    for index, layer in enumerate(checkpoint.geometry.layers):
        intermediate = layer.expert.intermediate // num_ranks
        spec = ExpertSpec.build(
            hidden=layer.expert.hidden,
            intermediate=intermediate,
            gate=layer.expert.gate,
            has_bias=False,
            dtype="float32",
        )
        model.add(MoELayer(layer.name, layer.num_experts, layer.top_k, spec))
        mine = slice(rank * intermediate, (rank + 1) * intermediate)
        for expert in range(layer.num_experts):
            gate, up = whole[index, expert]["up"].chunk(2)
            down = whole[index, expert]["down"]
            record = model.banks[index][expert * spec.record_bytes :][: spec.record_bytes]
            flat = torch.cat([gate[mine].flatten(), up[mine].flatten(), down[:, mine].flatten()])
            record[: flat.nbytes].view(torch.float32).copy_(flat)
    for index in range(len(model.layers)):
        model.loaded(index)
    return model


@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (0, 2), (1, 2)])
def test_every_record_is_compared(
    checkpoint: CheckpointFiles, whole: Whole, rank: int, num_ranks: int
) -> None:
    model = rank_of(checkpoint, whole, rank=rank, num_ranks=num_ranks)
    ranks = {"rank": rank, "num_ranks": num_ranks}
    assert list(audit_files(model, checkpoint, **ranks)) == []
    model.store.fields(1, 3)["down"][2, 1] += 1e-6  # the control
    (said,) = audit_files(model, checkpoint, **ranks)
    assert "expert 3" in said and "differs from the checkpoint" in said


def test_another_rank_differs(checkpoint: CheckpointFiles, whole: Whole) -> None:
    model = rank_of(checkpoint, whole, rank=0, num_ranks=2)
    assert any(audit_files(model, checkpoint, rank=1, num_ranks=2))


def test_another_model_differs(checkpoint: CheckpointFiles, whole: Whole) -> None:
    model = rank_of(checkpoint, whole, rank=0, num_ranks=1)
    model.layers[0] = replace(model.layers[0], num_experts=model.layers[0].num_experts + 1)
    (said,) = audit_files(model, checkpoint)
    assert "layers of experts" in said
