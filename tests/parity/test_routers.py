"""Routers are the library's: what reports of other programs say went wrong with them does not here.

Precision and ties of the first k, and scaling beside normalisation, on weights chosen so that the
scores are known.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from checkpoints import meta_model
from hotset.kernels.topk import softmax_topk_reference
from tiny import tiny_config

HIDDEN = 32


def router(model_type: str, logits_E: list[float], **fields: object) -> nn.Module:
    """A gate of hotset's model that gives these logits to an input of ones at the first place."""
    values = {**tiny_config(model_type).to_dict(), "num_experts_per_tok": 2, **fields}
    for name in ("model_type", "layer_types", "mlp_layer_types"):
        values.pop(name, None)
    model = meta_model(type(tiny_config(model_type))(**values))
    gate: nn.Module = model.get_submodule("model.layers.3.mlp.gate").to_empty(device="cpu")
    for tensor in (*gate.parameters(), *gate.buffers()):
        tensor.data.zero_()
    gate.weight.data[:, 0] = torch.tensor(logits_E)
    return gate


def first_place() -> torch.Tensor:
    x_TH = torch.zeros(1, HIDDEN)
    x_TH[0, 0] = 1
    return x_TH


def test_a_near_tie_is_decided_in_fp32() -> None:
    """Case QN-15: probabilities of these logits are equal in BF16."""
    logits = [1.0, 1.0005, *[0.0] * 6]
    gate = router("qwen3_moe", logits, num_experts_per_tok=1)
    assert gate(first_place())[2].tolist() == [[1]]
    logits_TE = torch.tensor([logits])
    options = {"normalise": False, "dtype": torch.float32}
    assert softmax_topk_reference(logits_TE, 1, **options)[1].tolist() == [[1]]
    # The control, and what decides where nothing else does: the lowest id.
    rounded = logits_TE.softmax(-1).bfloat16()
    assert rounded[0, 0] == rounded[0, 1]
    equal = torch.tensor([[1.0, 1.0, *[0.0] * 6]])
    assert softmax_topk_reference(equal, 1, **options)[1].tolist() == [[0]]


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize(("normalise", "want"), [(False, (1.25, 0.75)), (True, (1.5625, 0.9375))])
def test_weights_are_scaled_whether_they_are_normalised_or_not(
    model_type: str, normalise: bool, want: tuple[float, float]
) -> None:
    """Case QN-16: scores of 0.5 and 0.3, factor 2.5."""
    logits = [0.0, math.log(0.3 / 0.7), *[-9.0] * 6]
    fields = {"routed_scaling_factor": 2.5, "norm_topk_prob": normalise}
    _, weights, ids = router(model_type, logits, **fields)(first_place())
    by_id = dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))
    # A logarithm, a sigmoid, a sum, a quotient and a product, each rounded once.
    assert by_id == pytest.approx(dict(enumerate(want)), rel=8 * torch.finfo(torch.float32).eps)
