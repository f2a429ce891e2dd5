"""The specification of every op, in plain torch. Slow on purpose, right by inspection.

    W = round(value(code) * scale)        quantised weights: see `dequantise`
    u = W_up x (+ up_bias)                FP32 sums
    h = round(gate(u))                    gate in FP32, rounded once to the model's dtype
    y[t, k] = W_down h (+ down_bias)      FP32 sums, kept in FP32
    out_t = round(sum over k, ascending, of weights[t, k] * y[t, k])

Weights are read through their address and in no other way, on any device, so that a wrong
address shows in the output. Synchronises with the host freely.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch.nn import functional

from hotset.core.geometry import Activation, ExpertSpec, Gate, GateForm
from hotset.kernels.dequantise import multiplied_weights
from hotset.kernels.gather import copy_records, gather_records

# (address, nbytes, device) -> uint8 [nbytes] on that device
ReadRecord = Callable[[int, int, torch.device], torch.Tensor]


def read_record(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """The bytes at `address`: uint8 [nbytes], a view of that memory on a CPU, a copy on CUDA."""
    if device.type == "cpu":
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8)
    addresses = torch.tensor([address], dtype=torch.int64, device=device)
    return gather_records(addresses, nbytes)[0]


def record_fields(record: torch.Tensor, spec: ExpertSpec) -> dict[str, torch.Tensor]:
    """The fields of one record (uint8 [record_bytes]) as views with their shape and dtype."""
    return {
        field.name: record[field.offset : field.offset + field.nbytes]
        .view(getattr(torch, field.dtype))
        .view(field.shape)
        for field in spec.layout.fields
    }


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """a(x), in the dtype of x."""
    match activation:
        case Activation.SILU:
            return functional.silu(x)
        case Activation.GELU:
            return functional.gelu(x)
        case Activation.GELU_TANH:
            return functional.gelu(x, approximate="tanh")
        case Activation.RELU:
            return functional.relu(x)
        case Activation.RELU2:
            return functional.relu(x).square()


def apply_gate(u: torch.Tensor, gate: Gate) -> torch.Tensor:
    """The gate of `core.geometry.GateForm`: [..., 2I] (gate half first) to [..., I].

    Without a gate [..., I] to [..., I]. Computed in the dtype of `u`, FP32 in the specification.
    """
    limit = gate.limit
    if gate.form is GateForm.NONE:
        return activate(u, gate.activation)
    g, u = u.chunk(2, dim=-1)
    match gate.form:
        case GateForm.PLAIN:
            return activate(g, gate.activation) * u
        case GateForm.CLAMPED:
            return activate(g.clamp(max=limit), gate.activation) * u.clamp(-limit, limit)
        case GateForm.SWIGLU_OAI:
            g = g.clamp(max=limit)
            return g * torch.sigmoid(gate.alpha * g) * (u.clamp(-limit, limit) + 1)
        case GateForm.CLAMPED_AFTER:
            return activate(g, gate.activation).clamp(max=limit) * u.clamp(-limit, limit)
        case GateForm.SOFTCAPPED:
            capped = gate.gate_cap * torch.tanh(g / gate.gate_cap)
            return capped * torch.sigmoid(g) * (gate.up_cap * torch.tanh(u / gate.up_cap))


def expert_output(x_NH: torch.Tensor, record: torch.Tensor, spec: ExpertSpec) -> torch.Tensor:
    """One expert on N tokens: [N, H] in the model's dtype to [N, H] FP32."""
    fields = record_fields(record, spec)
    up, down = multiplied_weights(fields, spec)
    bias = {name: fields[name].float() for name in ("up_bias", "down_bias") if spec.has_bias}
    u = functional.linear(x_NH.float(), up, bias.get("up_bias"))
    h = apply_gate(u, spec.gate).to(x_NH.dtype)
    return functional.linear(h.float(), down, bias.get("down_bias"))


def expert_outputs(
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    address_E: torch.Tensor,
    spec: ExpertSpec,
    *,
    out: torch.Tensor | None = None,
    fill_E: torch.Tensor | None = None,
    read_record: ReadRecord = read_record,
) -> torch.Tensor:
    """FP32 [T, K, H]; see `dispatch.Kernels.expert_outputs` for arguments and rules.

    FP32 products must be IEEE, which is torch's default (`highest`).
    """
    assert x_TH.device.type == "cpu" or torch.get_float32_matmul_precision() == "highest"
    (num_tokens, top_k), num_experts = ids_TK.shape, address_E.numel()
    if out is None:
        out = x_TH.new_zeros(num_tokens, top_k, spec.hidden, dtype=torch.float32)
    out[(ids_TK < 0) | (ids_TK >= num_experts)] = 0.0
    addresses = address_E.tolist()
    for expert in torch.unique(ids_TK).tolist():
        if not (0 <= expert < num_experts and addresses[expert]):
            continue
        token, choice = torch.where(ids_TK == expert)
        record = read_record(addresses[expert], spec.record_bytes, x_TH.device)
        out[token, choice] = expert_output(x_TH[token], record, spec)
        if fill_E is not None:
            one = slice(expert, expert + 1)
            copy_records(address_E[one], fill_E[one], spec.record_bytes)
    return out


def dequantise_records(
    address_N: torch.Tensor,
    spec: ExpertSpec,
    out_ND: torch.Tensor,
    counts_N: torch.Tensor | None = None,
) -> None:
    """Records as plain ones; see `dispatch.Kernels.dequantise_records`."""
    plain = spec.as_plain()
    if counts_N is not None:
        address_N = address_N * (counts_N > 0)
    for address, row in zip(address_N.tolist(), out_ND, strict=True):
        if address:
            fields = record_fields(read_record(address, spec.record_bytes, row.device), spec)
            fields["up"], fields["down"] = multiplied_weights(fields, spec)
            for name, target in record_fields(row, plain).items():
                target.copy_(fields[name])


def combine(y_TKH: torch.Tensor, weights_TK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The layer's output [T, H] in `dtype` from FP32 [T, K, H] and routing weights [T, K]."""
    weights_TK = weights_TK.float()
    out_TH = torch.zeros_like(y_TKH[:, 0])
    for k in range(y_TKH.shape[1]):
        out_TH += weights_TK[:, k, None] * y_TKH[:, k]
    return out_TH.to(dtype)


def add_experts(
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor,
    address_E: torch.Tensor,
    spec: ExpertSpec,
    *,
    ids_TK: torch.Tensor,
    first: int,
    stop: int,
    sum_TH: torch.Tensor,
    out_TH: torch.Tensor,
    post_norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Adds a range of experts to its tokens' sums; see `dispatch.Kernels.add_experts`."""
    inside_E = torch.zeros_like(address_E)
    inside_E[first:stop] = address_E[first:stop]
    y_TKH = x_TH.new_empty(*ids_TK.shape, spec.hidden, dtype=torch.float32)
    expert_outputs(x_TH, ids_TK, inside_E, spec, out=y_TKH)
    if post_norm is not None:
        y_TKH = post_norm(y_TKH.to(x_TH.dtype)).float()
    accumulate(
        y_TKH,
        ids_TK,
        weights_TK,
        first=first,
        stop=stop,
        num_experts=address_E.numel(),
        sum_TH=sum_TH,
        out_TH=out_TH,
    )


def accumulate(
    y_TKH: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    *,
    first: int,
    stop: int,
    num_experts: int,
    sum_TH: torch.Tensor,
    out_TH: torch.Tensor,
) -> None:
    """Adds the outputs of experts `first` .. `stop` - 1 to their tokens' sums, in ascending k."""
    weights_TK = weights_TK.float()
    real_TK = (ids_TK >= 0) & (ids_TK < num_experts)
    wanted_TK = (ids_TK >= first) & (ids_TK < stop)
    sum_TH[~(real_TK & (ids_TK < first)).any(dim=1)] = 0.0
    for k in range(ids_TK.shape[1]):
        rows = wanted_TK[:, k]
        sum_TH[rows] += weights_TK[rows, k, None] * y_TKH[rows, k]
    whole = wanted_TK.any(dim=1) & ~(real_TK & (ids_TK >= stop)).any(dim=1)
    out_TH[whole] = sum_TH[whole].to(out_TH.dtype)
