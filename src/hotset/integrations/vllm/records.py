"""vLLM's expert parameters as views of hotset's records: its loader then writes into the arena.

Knows names, shapes and order of vLLM's unquantised parameters (`w13_weight`, `w2_weight` and
their biases), and the gate each activation means. Knows no layers, devices or policies.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from hotset.core.config import DTYPES
from hotset.core.errors import ConfigError
from hotset.core.geometry import Activation, ExpertSpec, Gate, GateForm

# vLLM's parameter -> field of a record.
FIELDS = {"w13_weight": "up", "w2_weight": "down", "w13_bias": "up_bias", "w2_bias": "down_bias"}

_PLAIN = {
    MoEActivation.SILU: Activation.SILU,
    MoEActivation.GELU: Activation.GELU,
    MoEActivation.GELU_TANH: Activation.GELU_TANH,
}
_UNGATED = {
    MoEActivation.SILU_NO_MUL: Activation.SILU,
    MoEActivation.GELU_NO_MUL: Activation.GELU,
    MoEActivation.GELU_TANH_NO_MUL: Activation.GELU_TANH,
    MoEActivation.RELU2_NO_MUL: Activation.RELU2,
}
# What vLLM's `swigluoai` takes where a model says nothing (gpt-oss).
_OAI_ALPHA, _OAI_LIMIT = 1.702, 7.0


def spec_of(moe: FusedMoEConfig, dtype: torch.dtype) -> ExpertSpec:
    """An expert of this layer on this rank: with tensor parallelism, its part of the rows of the
    first projection and of the columns of the second.

    Raises:
        ConfigError: an activation or a dtype that the kernels do not know.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"experts of `{name}` are not supported", hint="set `--dtype`")
    return ExpertSpec.build(
        hidden=moe.hidden_dim,
        intermediate=moe.intermediate_size_per_partition,
        gate=gate_of(moe),
        has_bias=moe.has_bias,
        dtype=name,
    )


def gate_of(moe: FusedMoEConfig) -> Gate:
    """The gate that vLLM's activation and its constants mean.

    Raises:
        ConfigError: one that the kernels do not know.
    """
    kind, limit = moe.activation, moe.swiglu_limit
    alpha, beta = moe.swiglu_alpha, moe.swiglu_beta
    if kind in (MoEActivation.SWIGLUOAI, MoEActivation.SWIGLUOAI_UNINTERLEAVE):
        return _oai_gate(moe)
    if kind is MoEActivation.SILU and limit is not None:
        # clamp, then silu(g) * u: the OAI form with its constants 1 and 0
        if alpha in (None, 1.0) and beta in (None, 0.0):
            return Gate(GateForm.CLAMPED, Activation.SILU, limit=float(limit))
    elif kind in _PLAIN:
        return Gate(GateForm.PLAIN, _PLAIN[kind])
    elif kind in _UNGATED:
        return Gate(GateForm.NONE, _UNGATED[kind])
    raise ConfigError(
        f"experts with the activation `{kind.value}` (limit {limit}, alpha {alpha}, beta {beta}) "
        "are not supported inside vLLM",
        hint="run this model without hotset in `--additional-config`",
    )


def _oai_gate(moe: FusedMoEConfig) -> Gate:
    alpha, limit = moe.swiglu_alpha, moe.swiglu_limit
    if moe.swiglu_beta not in (None, 1.0):
        raise ConfigError(f"`swigluoai` experts with beta {moe.swiglu_beta} are not supported")
    return Gate(
        GateForm.SWIGLU_OAI,
        limit=_OAI_LIMIT if limit is None else float(limit),
        alpha=_OAI_ALPHA if alpha is None else float(alpha),
    )


def parameter_views(
    bank: torch.Tensor, spec: ExpertSpec, num_experts: int
) -> dict[str, torch.Tensor]:
    """A layer's parameters as vLLM shapes them, [E, ...], over the records of its bank.

    Args:
        bank: uint8, records side by side.
    """
    record_bytes = spec.record_bytes
    records = bank[: num_experts * record_bytes].view(num_experts, record_bytes)
    return {
        name: records[:, field.offset : field.offset + field.nbytes]
        .view(getattr(torch, field.dtype))
        .unflatten(1, field.shape)
        for name, wanted in FIELDS.items()
        for field in spec.layout.fields
        if field.name == wanted
    }


def is_interleaved(moe: FusedMoEConfig) -> bool:
    """Whether vLLM keeps rows of gate and up in turn: [gate 0, up 0, gate 1, ...]."""
    return bool(moe.activation is MoEActivation.SWIGLUOAI)


def put_halves_apart(views: dict[str, torch.Tensor]) -> None:
    """Rows in turn to rows of the gate, then of the up half: in place, an expert at a time."""
    for name in ("w13_weight", "w13_bias"):
        for rows in views.get(name, ()):
            rows.copy_(torch.cat([rows[0::2], rows[1::2]]))
