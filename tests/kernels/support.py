"""What the kernel tests share: random experts at real addresses, an oracle, its error bounds.

The oracle computes in FP64 and knows for every value how far a right FP32 implementation may be
from it, so that a check is as sharp as the arithmetic allows and no tolerance is guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hotset.bench.random_records import fill_random
from hotset.core.formats import PLAIN, WeightFormat
from hotset.core.geometry import Activation, ExpertSpec, Gate, GateForm
from hotset.kernels.dequantise import multiplied_weights
from hotset.kernels.reference import apply_gate, record_fields

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS32 = 2.0**-23

GATES = {
    "no gate, relu2": Gate(GateForm.NONE, Activation.RELU2),
    "no gate, silu": Gate(GateForm.NONE, Activation.SILU),
    "silu": Gate(GateForm.PLAIN, Activation.SILU),
    "gelu": Gate(GateForm.PLAIN, Activation.GELU),
    "gelu_tanh": Gate(GateForm.PLAIN, Activation.GELU_TANH),
    "relu": Gate(GateForm.PLAIN, Activation.RELU),
    "clamped": Gate(GateForm.CLAMPED, limit=0.8),
    "swiglu_oai": Gate(GateForm.SWIGLU_OAI, limit=0.9, alpha=1.702),
    "clamped_after": Gate(GateForm.CLAMPED_AFTER, limit=0.4),
    "softcapped": Gate(GateForm.SOFTCAPPED, gate_cap=1.5, up_cap=0.7),
}
SILU = GATES["silu"]


@dataclass
class Experts:
    """E records of one spec in one buffer on `DEVICE`, and their addresses."""

    spec: ExpertSpec
    records: torch.Tensor  # uint8 [E, record_bytes]

    @property
    def addresses(self) -> torch.Tensor:
        return addresses_of(self.records)

    def fields(self, expert: int) -> dict[str, torch.Tensor]:
        return record_fields(self.records[expert], self.spec)

    def copy(self) -> Experts:
        """The same bytes at other addresses."""
        return Experts(self.spec, self.records.clone())


def addresses_of(records: torch.Tensor) -> torch.Tensor:
    """int64 [E] on the records' device."""
    rows = torch.arange(len(records), device=records.device)
    return rows * records.stride(0) + records.data_ptr()


def make_experts(
    num_experts: int,
    *,
    hidden: int,
    intermediate: int,
    gate: Gate = SILU,
    bias: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    device: torch.device = DEVICE,
    weights: WeightFormat = PLAIN,
    down_weights: WeightFormat | None = None,
) -> Experts:
    """Random experts whose activations are of order 1; bytes between fields are not 0."""
    spec = ExpertSpec.build(
        hidden=hidden,
        intermediate=intermediate,
        gate=gate,
        has_bias=bias,
        dtype=dtype,
        weights=weights,
        down_weights=down_weights,
    )
    source = torch.Generator(device).manual_seed(seed)
    shape = (num_experts, spec.record_bytes)
    experts = Experts(
        spec, torch.randint(256, shape, dtype=torch.uint8, generator=source, device=device)
    )
    fill_random(experts.records, spec, source)
    return experts


def make_inputs(
    experts: Experts, num_tokens: int, top_k: int, *, seed: int = 1, padding: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x_TH, ids_TK): ids repeat within rows, and include the paddings -1 and E unless told."""
    source = torch.Generator().manual_seed(seed)
    num_experts, spec = len(experts.records), experts.spec
    low, high = (-1, num_experts + 1) if padding else (0, num_experts)
    ids_TK = torch.randint(low, high, (num_tokens, top_k), generator=source)
    x_TH = torch.randn(num_tokens, spec.hidden, generator=source)
    device = experts.records.device
    return x_TH.to(getattr(torch, spec.dtype)).to(device), ids_TK.to(device)


@dataclass
class Oracle:
    """Exact FP64 values of y[t, k] and how far a right FP32 result may be away from each."""

    value: torch.Tensor
    bound: torch.Tensor

    def excess(self, got: torch.Tensor) -> float:
        """Largest |error| / bound: right up to 1. NaN counts as infinite."""
        error = (got.double() - self.value).abs()
        return (error / self.bound).nan_to_num(nan=torch.inf).max().item()

    def check(self, got: torch.Tensor) -> None:
        error = (got.double() - self.value).abs()
        excess = self.excess(got)
        assert excess <= 1, (
            f"{excess:.3g} x bound; error max {error.max():.3g} mean {error.mean():.3g}"
        )


def oracle(experts: Experts, x_TH: torch.Tensor, ids_TK: torch.Tensor) -> Oracle:
    """The specification in FP64; rows of padding are 0 and must be exactly that."""
    num_tokens, top_k = ids_TK.shape
    shape = (num_tokens, top_k, experts.spec.hidden)
    value = torch.zeros(shape, dtype=torch.float64, device=x_TH.device)
    bound = torch.full_like(value, torch.finfo(torch.float64).tiny)
    for expert in range(len(experts.records)):
        token, choice = torch.where(ids_TK == expert)
        if len(token):
            field = experts.fields(expert)
            up, down = multiplied_weights(field, experts.spec)
            field = {name: v.double() for name, v in field.items()}
            field |= {"up": up.double(), "down": down.double()}
            y, slack = _one_expert(x_TH[token].double(), field, experts.spec)
            value[token, choice], bound[token, choice] = y, slack + bound[0, 0, 0]
    return Oracle(value, bound)


def _one_expert(
    x: torch.Tensor, field: dict[str, torch.Tensor], spec: ExpertSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, bound) of one expert.

    A sum of n products in FP32 in any order errs by about sqrt(n) * eps * sum |products|. That
    moves u within an interval; the gate's interval follows from its corners, and errs by a few
    eps of the magnitudes that meet in it. Rounded to the model's dtype the two ends of that
    interval are equal for nearly all of h: only where they differ may h be either, and only that
    much may y move, beside its own sum's error.
    """
    nothing = torch.zeros((), dtype=torch.float64, device=x.device)
    bias = field.get("up_bias", nothing)
    u = x @ field["up"].T + bias
    du = EPS32 * (spec.hidden + 1) ** 0.5 * (x.abs() @ field["up"].abs().T + bias.abs())
    low, high = _gate_interval(u, du, spec.gate)
    dtype = getattr(torch, spec.dtype)
    low, high = low.to(dtype).double(), high.to(dtype).double()

    bias = field.get("down_bias", nothing)
    y = (low + high) / 2 @ field["down"].T + bias
    size = torch.maximum(low.abs(), high.abs()) @ field["down"].abs().T + bias.abs()
    either = (high - low) / 2 @ field["down"].abs().T
    return y, either + EPS32 * (spec.intermediate + 1) ** 0.5 * size


def _gate_interval(
    u: torch.Tensor, du: torch.Tensor, gate: Gate
) -> tuple[torch.Tensor, torch.Tensor]:
    ends = [u - du, u + du]
    if gate.has_gate:
        halves = [end.chunk(2, dim=-1) for end in ends]
        corners = [torch.cat((g[0], v[1]), dim=-1) for g in halves for v in halves]
        first, second = u.abs().chunk(2, dim=-1)
    else:
        corners, first, second = ends, u.abs(), u.abs()
    values = torch.stack([apply_gate(corner, gate) for corner in corners])
    # exp and erf are right to a few eps of their argument and of 1, never of a small result.
    own = 16 * EPS32 * (1 + first) * (1 + second)
    return values.amin(0) - own, values.amax(0) + own


def mistaken(experts: Experts, change: Callable[[dict[str, torch.Tensor]], None]) -> Experts:
    """The same experts after `change` of every record: what a wrong kernel would have read."""
    wrong = experts.copy()
    for expert in range(len(wrong.records)):
        change(wrong.fields(expert))
    return wrong


def swap_gate_and_up(field: dict[str, torch.Tensor]) -> None:
    for name in ("up", "up_bias"):
        if name in field:
            field[name].copy_(torch.roll(field[name].clone(), len(field[name]) // 2, dims=0))


def skip_last_columns(field: dict[str, torch.Tensor]) -> None:
    """As if the last step of the reduction over H were missing."""
    field["up"][:, -1:] = 0


def skip_last_units(field: dict[str, torch.Tensor]) -> None:
    """As if the last step of the reduction over I were missing."""
    field["down"][:, -1:] = 0


def scale_slightly(field: dict[str, torch.Tensor]) -> None:
    """Every third weight of W_down off by 2^-7 of its value."""
    field["down"][:, ::3] *= 1 + 2.0**-7


def interleave_halves(field: dict[str, torch.Tensor]) -> None:
    """Gate and up rows in turn instead of one half after the other."""
    for name in ("up", "up_bias"):
        if name in field:
            half = len(field[name]) // 2
            rows = field[name].clone()
            field[name][0 : 2 * half : 2] = rows[:half]
            field[name][1 : 2 * half : 2] = rows[half : 2 * half]


def round_to_tf32(field: dict[str, torch.Tensor]) -> None:
    """As a tensor core without `ieee` would read FP32: 10 bits of the significand."""
    for name in ("up", "down"):
        field[name].view(torch.int32).bitwise_and_(~0x1FFF)


MISTAKES = (
    swap_gate_and_up,
    interleave_halves,
    skip_last_columns,
    skip_last_units,
    scale_slightly,
)
