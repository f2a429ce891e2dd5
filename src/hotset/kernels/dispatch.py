"""Which implementation of the expert ops runs, and the interface that both have.

Knows devices and shapes. The choice between kernels depends on the token count alone, never on
where a record lies: output bits depend on model, dtype, device, software and token shape only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from hotset.core.errors import ConfigError
from hotset.core.geometry import ExpertSpec
from hotset.kernels import match_reference, reference
from hotset.kernels.contract import check_inputs, check_plain_records
from hotset.kernels.grouping import Grouping, group_tokens
from hotset.kernels.launch import is_few
from hotset.kernels.match_reference import LayerMatch
from hotset.kernels.ranges import NumBlocks, Ranges

CHOICES = ("reference", "triton")


class Kernels(Protocol):
    """The expert ops of one MoE layer.

    All tensors are on one device; ids and routing weights may have any strides, the others are
    contiguous.
    """

    @property
    def name(self) -> str:
        """`reference` or `triton`."""

    def groups(self, num_tokens: int, top_k: int, spec: ExpertSpec) -> bool:
        """Whether `expert_outputs` of so many tokens takes a `grouping`."""

    def group(self, ids_TK: torch.Tensor, num_experts: int) -> Grouping:
        """Sorts routed pairs by expert, without a host synchronisation; see `grouping`."""

    def expert_outputs(
        self,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        address_E: torch.Tensor,
        spec: ExpertSpec,
        *,
        grouping: Grouping | None = None,
        out: torch.Tensor | None = None,
        fill_E: torch.Tensor | None = None,
        behind_match: bool = False,
    ) -> torch.Tensor:
        """Runs each token's routed experts.

        Args:
            x_TH: [T, H] in the experts' dtype.
            ids_TK: [T, K] integer expert ids; repeated ids are fine. Ids outside [0, E) are
                padding: they read nothing and their rows of the result are zero.
            address_E: int64 [E], address of each expert's record as this device sees it, a
                multiple of 64. 0 means "not in this call": the rows of such an expert in a
                given `out` are left untouched, in a fresh result they are zero.
            spec: shape, gate and record layout of these experts.
            grouping: `group(ids_TK, E)`, to share one between calls; made here otherwise.
            out: FP32 [T, K, H] to write to; made here otherwise.
            fill_E: int64 [E], address of a slot that shall get the expert's record as it is
                read, 0 for none. Only experts that are routed to and have an address are
                filled, all their fields exactly; bytes between fields may stay as they are. A
                slot must not be what another expert of this call reads.
            behind_match: `match` of the same ids was the last thing that was queued, so that
                reading may begin before it has ended.

        Returns:
            FP32 [T, K, H], `out` if given.
        """

    def dequantise_records(
        self,
        address_N: torch.Tensor,
        spec: ExpertSpec,
        out_ND: torch.Tensor,
        *,
        counts_N: torch.Tensor | None = None,
    ) -> None:
        """Writes N records as plain ones, for `expert_outputs` with `spec.as_plain()`.

        The weights are those that `expert_outputs` makes of the packed records, bit for bit; a
        prompt multiplies with each many times and so saves making them again.

        Args:
            address_N: int64 [N], addresses of records; the row of a 0 is left untouched.
            spec: of the packed records.
            out_ND: uint8 [N, plain record bytes], contiguous, rows at multiples of 64 bytes.
            counts_N: integers [N], tokens of each: what has none is not read, and its row is left
                untouched too. Without them all are read.
        """

    def match(
        self, ids_TK: torch.Tensor, layer: LayerMatch, *, grouping: Grouping | None = None
    ) -> None:
        """Finds which missing experts are filled into whose slots in this step.

        Writes `layer.fill_E`, which `expert_outputs` of the same ids then takes, and
        `layer.evict_V`. Addresses stay as they are until `combine` is told of `layer`.

        Args:
            ids_TK: as for `expert_outputs`.
            layer: addresses and wishes of the layer; see `match_reference`.
            grouping: `group(ids_TK, E)`; saves comparing all ids with all experts.
        """

    def combine(
        self,
        y_TKH: torch.Tensor,
        weights_TK: torch.Tensor,
        dtype: torch.dtype,
        *,
        matched: LayerMatch | None = None,
        behind_experts: bool = False,
    ) -> torch.Tensor:
        """[T, H]: sum over k, ascending, in FP32 of weights[t, k] * y[t, k], rounded once.

        Args:
            matched: what `match` found; its `address_W` is retargeted: filled experts to their
                slots, victims to the host. Must come behind the `expert_outputs` that filled.
            behind_experts: `expert_outputs` was the last thing that was queued, and `weights_TK`
                and the match were there before it, so that no wait is needed for them.
        """

    @property
    def joins_blocks(self) -> bool:
        """Whether a token's bits are its own, whichever tokens and however many run with it."""

    def add_experts(
        self,
        x_TH: torch.Tensor,
        weights_TK: torch.Tensor,
        address_E: torch.Tensor,
        spec: ExpertSpec,
        *,
        ranges: Ranges,
        first: int,
        stop: int,
        sum_TH: torch.Tensor,
        out_TH: torch.Tensor,
        num_blocks: NumBlocks = None,
        post_norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Runs experts first .. stop - 1 on a prompt's tokens and adds weights[t, k] * y[t, k].

        In ascending k, each term rounded into the FP32 sum as it is added. As each row's ids
        ascend, a row's sum has the same bits however the experts are cut into ranges, which
        follow each other from the first expert to the last.

        Args:
            x_TH, address_E, spec: as for `expert_outputs`; every expert of the range that has
                tokens has an address.
            weights_TK: routing weights, contiguous, in the order of `ranges.ids_TK`.
            ranges: of the routed ids.
            sum_TH: FP32 [T, H], added to; read of a token only behind its first expert.
            out_TH: [T, H] in the dtype of `x_TH`; a token's row is written with its last expert.
            num_blocks: see `Ranges.windows`; saves launches that run nothing.
            post_norm: applied to each output, rounded to the model's dtype, before it is weighted.
        """


class ReferenceKernels:
    """Plain torch; on a CPU this is what the engine runs."""

    name = "reference"
    joins_blocks = False  # the host library's products round by the number of rows

    def groups(self, num_tokens: int, top_k: int, spec: ExpertSpec) -> bool:
        return False

    def group(self, ids_TK: torch.Tensor, num_experts: int) -> Grouping:
        return group_tokens(ids_TK, num_experts)

    def expert_outputs(
        self,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        address_E: torch.Tensor,
        spec: ExpertSpec,
        *,
        grouping: Grouping | None = None,
        out: torch.Tensor | None = None,
        fill_E: torch.Tensor | None = None,
        behind_match: bool = False,
    ) -> torch.Tensor:
        check_inputs(x_TH, ids_TK, address_E, spec, out)
        return reference.expert_outputs(x_TH, ids_TK, address_E, spec, out=out, fill_E=fill_E)

    def dequantise_records(
        self,
        address_N: torch.Tensor,
        spec: ExpertSpec,
        out_ND: torch.Tensor,
        *,
        counts_N: torch.Tensor | None = None,
    ) -> None:
        check_plain_records(address_N, spec, out_ND, counts_N)
        reference.dequantise_records(address_N, spec, out_ND, counts_N)

    def match(
        self, ids_TK: torch.Tensor, layer: LayerMatch, *, grouping: Grouping | None = None
    ) -> None:
        layer.check()
        match_reference.match(ids_TK, layer)

    def combine(
        self,
        y_TKH: torch.Tensor,
        weights_TK: torch.Tensor,
        dtype: torch.dtype,
        *,
        matched: LayerMatch | None = None,
        behind_experts: bool = False,
    ) -> torch.Tensor:
        out_TH = reference.combine(y_TKH, weights_TK, dtype)
        if matched is not None:
            match_reference.retarget(matched)
        return out_TH

    def add_experts(
        self,
        x_TH: torch.Tensor,
        weights_TK: torch.Tensor,
        address_E: torch.Tensor,
        spec: ExpertSpec,
        *,
        ranges: Ranges,
        first: int,
        stop: int,
        sum_TH: torch.Tensor,
        out_TH: torch.Tensor,
        num_blocks: NumBlocks = None,
        post_norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        check_inputs(x_TH, ranges.ids_TK, address_E, spec, None)
        reference.add_experts(
            x_TH,
            weights_TK,
            address_E,
            spec,
            ids_TK=ranges.ids_TK,
            first=first,
            stop=stop,
            sum_TH=sum_TH,
            out_TH=out_TH,
            post_norm=post_norm,
        )


class TritonKernels:
    """Triton; never waits for the device, so a step can be captured in a CUDA graph."""

    name = "triton"
    joins_blocks = True

    def groups(self, num_tokens: int, top_k: int, spec: ExpertSpec) -> bool:
        size, longest = getattr(torch, spec.dtype).itemsize, max(spec.hidden, spec.intermediate)
        few = spec.is_plain and is_few(num_tokens, top_k, size, longest)
        return num_tokens > 1 and not few

    def group(self, ids_TK: torch.Tensor, num_experts: int) -> Grouping:
        return group_tokens(ids_TK, num_experts)

    def expert_outputs(
        self,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        address_E: torch.Tensor,
        spec: ExpertSpec,
        *,
        grouping: Grouping | None = None,
        out: torch.Tensor | None = None,
        fill_E: torch.Tensor | None = None,
        behind_match: bool = False,
    ) -> torch.Tensor:
        from hotset.kernels.moe_decode import one_token
        from hotset.kernels.moe_few import few_tokens
        from hotset.kernels.moe_grouped import grouped

        behind_match &= ids_TK.is_contiguous()  # a copy would come between
        ids_TK = ids_TK.contiguous()  # routers slice what they sort
        check_inputs(x_TH, ids_TK, address_E, spec, out)
        if ids_TK.numel() == 0:
            shape = (*ids_TK.shape, spec.hidden)
            return x_TH.new_empty(shape, dtype=torch.float32) if out is None else out
        if self.groups(len(x_TH), ids_TK.shape[1], spec):
            grouping = grouping or self.group(ids_TK, address_E.numel())
            return grouped(x_TH, ids_TK, address_E, spec, grouping=grouping, out=out, fill_E=fill_E)
        run = one_token if len(x_TH) == 1 else few_tokens
        return run(x_TH, ids_TK, address_E, spec, out=out, fill_E=fill_E, behind_match=behind_match)

    def dequantise_records(
        self,
        address_N: torch.Tensor,
        spec: ExpertSpec,
        out_ND: torch.Tensor,
        *,
        counts_N: torch.Tensor | None = None,
    ) -> None:
        from hotset.kernels.dequantise_records import dequantise_records

        check_plain_records(address_N, spec, out_ND, counts_N)
        dequantise_records(address_N, spec, out_ND, counts_N)

    def match(
        self, ids_TK: torch.Tensor, layer: LayerMatch, *, grouping: Grouping | None = None
    ) -> None:
        from hotset.kernels.match import match

        match(ids_TK.contiguous(), layer, grouping=grouping)

    def combine(
        self,
        y_TKH: torch.Tensor,
        weights_TK: torch.Tensor,
        dtype: torch.dtype,
        *,
        matched: LayerMatch | None = None,
        behind_experts: bool = False,
    ) -> torch.Tensor:
        from hotset.kernels.combine import combine

        assert y_TKH.is_contiguous() and y_TKH.dtype == torch.float32
        behind_experts &= weights_TK.is_contiguous()  # a copy would come between
        weights_TK = weights_TK.contiguous()
        return combine(y_TKH, weights_TK, dtype, matched=matched, behind_experts=behind_experts)

    def add_experts(
        self,
        x_TH: torch.Tensor,
        weights_TK: torch.Tensor,
        address_E: torch.Tensor,
        spec: ExpertSpec,
        *,
        ranges: Ranges,
        first: int,
        stop: int,
        sum_TH: torch.Tensor,
        out_TH: torch.Tensor,
        num_blocks: NumBlocks = None,
        post_norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        from hotset.kernels.moe_prompt import add_experts

        check_inputs(x_TH, ranges.ids_TK, address_E, spec, None)
        assert weights_TK.is_contiguous() and weights_TK.shape == ranges.ids_TK.shape
        assert sum_TH.shape == out_TH.shape == x_TH.shape
        assert sum_TH.dtype == torch.float32 and out_TH.dtype == x_TH.dtype
        assert sum_TH.is_contiguous() and out_TH.is_contiguous()
        add_experts(
            x_TH,
            weights_TK,
            address_E,
            spec,
            ranges=ranges,
            first=first,
            stop=stop,
            sum_TH=sum_TH,
            out_TH=out_TH,
            num_blocks=num_blocks,
            post_norm=post_norm,
        )


def select_kernels(device: torch.device, forced: str | None = None) -> Kernels:
    """The kernels for a device: Triton on CUDA, the reference on a CPU, or the one forced.

    Raises:
        ConfigError: an unknown name; Triton forced on a CPU outside its interpreter, or on
            CUDA inside it.
    """
    if forced is not None and forced not in CHOICES:
        raise ConfigError(
            f"there are no kernels called `{forced}`", hint=f"use one of {', '.join(CHOICES)}"
        )
    name = forced or ("triton" if device.type == "cuda" else "reference")
    if name == "reference":
        return ReferenceKernels()
    from hotset.kernels import device as device_functions

    interpreted = device_functions.is_interpreted(device_functions.round_to)
    if interpreted and device.type == "cuda":
        raise ConfigError(
            "`TRITON_INTERPRET` is set, and Triton's interpreter cannot read a GPU's addresses",
            hint="unset `TRITON_INTERPRET`",
        )
    if not interpreted and device.type != "cuda":
        raise ConfigError(
            f"`triton` kernels cannot run on the device `{device}`",
            hint="use the `reference` kernels, or set `TRITON_INTERPRET=1` (for tests: very slow)",
        )
    return TritonKernels()
