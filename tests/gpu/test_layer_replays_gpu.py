"""Layers of experts inside vLLM, replayed as graphs: the bits, fills and counts of launches."""

from __future__ import annotations

import pytest
import torch

from hotset.core.geometry import ExpertSpec, Gate, GateForm, MoELayer
from hotset.integrations.vllm.config import PluginConfig
from hotset.integrations.vllm.model import ModelExperts
from hotset.integrations.vllm.verify import verify_experts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LAYERS, EXPERTS, TOP_K, HIDDEN = 3, 16, 4, 512
SPEC = ExpertSpec.build(
    hidden=HIDDEN, intermediate=256, gate=Gate(GateForm.PLAIN), has_bias=False, dtype="bfloat16"
)


def make_model() -> ModelExperts:
    """A part of the experts in slots beside the staging ring, the same weights every time."""
    slots = LAYERS * EXPERTS * 3 // 4
    model = ModelExperts(PluginConfig(vram_bytes=slots * SPEC.record_bytes), torch.device("cuda"))
    source = torch.Generator().manual_seed(0)
    for index in range(LAYERS):
        model.add(MoELayer(f"layers.{index}", EXPERTS, TOP_K, SPEC))
        weights = model.banks[index].view(torch.bfloat16)
        weights.copy_(torch.randn(weights.shape, generator=source) * 0.05)
    for index in range(LAYERS):
        model.loaded(index)
    return model


def outputs(model: ModelExperts, *, is_repeated: bool) -> list[torch.Tensor]:
    """Of steps of one, three and many tokens, their ids from a few experts first, then others."""
    source = torch.Generator().manual_seed(1)
    found = []
    for number in range(40):
        num_tokens = (1, 1, 3, 1, 3, 100)[number % 6]
        for index in range(LAYERS):
            x_TH = torch.randn(num_tokens, HIDDEN, generator=source).to("cuda", torch.bfloat16)
            among = EXPERTS // 2 if number < 20 else EXPERTS
            draws = torch.rand(num_tokens, among, generator=source)
            ids_TK = draws.argsort(dim=1)[:, :TOP_K].to("cuda", torch.int32)
            weights_TK = torch.rand(num_tokens, TOP_K, generator=source).cuda()
            with torch.inference_mode():
                out_TH = model.run(index, x_TH, ids_TK, weights_TK, is_repeated=is_repeated)
            found.append(out_TH.clone())
    model.end_step()
    return found


def test_replayed_layers_give_the_same_bits_fills_and_counts() -> None:
    plain, replayed = make_model(), make_model()
    wanted = outputs(plain, is_repeated=False)
    got = outputs(replayed, is_repeated=True)
    assert all(torch.equal(one, other) for one, other in zip(wanted, got, strict=True))
    assert replayed._replays is not None
    assert len(replayed._replays._captured) == 2 * LAYERS, "one and three tokens, each layer"
    assert replayed.traffic == plain.traffic and plain.traffic.fills > 0
    assert verify_experts(replayed) == []
