"""What a prompt takes until it is through the model, from the rates of a machine and a geometry.

    between two layers' experts = resident weights (FLOPs, or bytes) + attention FLOPs
                                  + norms and the like (bytes) + layer time
                                  + time of each chunk behind the first
    experts of a layer          = FLOPs, half a block of tokens counted for each expert, or bytes
                                  + weights that are dequantised beforehand: bytes, at their
                                    format's share of memory's rate (`format_rates`)
                                  + bytes of outputs and running sums

Missing records come over the link group by group, while the device computes on what is there; how
far the link may be ahead is what the staging buffers hold (`_streamed_ms`). Knows no budget; decode
steps are in `costmodel`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, log2

import numpy as np

from hotset.core.costmodel import Rates, distinct_experts
from hotset.core.format_rates import dequantise_bytes
from hotset.core.geometry import ModelGeometry, MoELayer
from hotset.core.record import DTYPE_BYTES
from hotset.core.staging import (
    COPY_US,
    GROUP_US,
    NUM_BUFFERS,
    PREFETCH_SHARE,
    DequantiseRule,
    block_tokens,
)

# A kernel's block of tokens of one expert; the last one of each expert is half full on average.
EXPERT_ROWS = 128
# FP32 outputs of the experts are read once, and the running sum of a token is read and written by
# each range of experts that has one of its own: bytes of a number.
_SUM_BYTES = 4

# Bytes of device memory for each element of the residual stream (twice), queries and keys: of the
# former a norm (4) and a residual sum (6), of the latter a norm (4), the rotary embedding (4), and
# of keys what writes them and their values (8), each a launch of its own. Of the Qwen3-30B-A3B
# shape at 32,768 tokens on an H200 norms, sums, embeddings, writes and the router took 0.72 ms a
# layer, and what joins the experts' blocks 0.06: 11 bytes, at 4.2 TB/s (profile of 3 layers). Where
# no fused kernel computes a norm or an embedding it is up to 128.
POINTWISE_BYTES = 12

# What a layer of a chunk with others before it takes beside `prompt_layer` of the machine: keys and
# values are gathered, attention runs in two parts that are merged, and all of it is launched while
# the host has groups to see to. Fitted to quantised prompts of 8,192 tokens in two chunks (12
# layers of the 30B-A3B shape on an H200, a quarter in slots, commit b7d3087). Measured over
# predicted was 1.11 (INT4), 1.26 (MXFP4), 1.30 (NVFP4) and 1.08 (FP8) without it and with weights
# made at the full rate, and is 0.93, 1.07, 1.09 and 0.99, by the rates of those runs. 32,768 tokens
# of BF16 in eight chunks asked for 1,400 each before norms were fused (decision 0015).
CHUNK_US = 1000.0

# Tokens of real text, and as many independent ones as use that many experts of a layer: neighbours
# route alike. Means over the beginnings of the sequences of three recorded models (gpt-oss-20b, a
# 54M and a 6M model; 2.4 to 2.9 at 4, 11 to 16 at 64, 13 to 28 at 256).
_TEXT_TOKENS = (1, 4, 16, 64, 256, 1024)
_AS_INDEPENDENT = (1.0, 2.7, 7.0, 13.0, 20.0, 35.0)


@dataclass(frozen=True)
class PromptCost:
    """Milliseconds until a prompt is through the model, by term.

    Attributes:
        stream_ms: bytes of experts without a slot, over the link; most of it beside the others.
        experts_ms: products of the experts, and their sums.
        resident_ms: FLOPs or bytes, whichever take longer, of what is no expert.
        attention_ms: scores and their sums.
        pointwise_ms: norms, rotary embeddings and residual sums: bytes of activations.
        layers_ms: what the layers take beyond that, for each chunk.
        total_ms: all together; more than the sum of the terms but the first by what the device
            waits for the link.
        num_passes: forwards over the whole model; each streams the cold experts once more.
    """

    stream_ms: float
    experts_ms: float
    resident_ms: float
    attention_ms: float
    pointwise_ms: float
    layers_ms: float
    total_ms: float
    num_passes: int

    @property
    def waiting_ms(self) -> float:
        """What the device waits for the link, or for the launches of a group."""
        return max(0.0, self.total_ms - self.experts_ms - self.attention_ms - self.rest_ms)

    @property
    def rest_ms(self) -> float:
        """What is neither experts nor attention."""
        return self.resident_ms + self.pointwise_ms + self.layers_ms


@dataclass(frozen=True)
class Staging:
    """How missing records reach the device.

    Attributes:
        ring_tokens: passes of so many tokens or more copy them through staging buffers, shorter
            ones read them in place.
        buffer_records: records of one buffer; 0 where all is read in place.
    """

    ring_tokens: int
    buffer_records: int

    def streams(self, num_tokens: int) -> bool:
        return self.buffer_records > 0 and num_tokens >= self.ring_tokens


def predict_prompt(
    geometry: ModelGeometry,
    rates: Rates,
    *,
    num_tokens: int,
    chunk_tokens: int,
    resident_share: Sequence[float],
    staging: Staging,
    together: bool = False,
    used: Sequence[float] | None = None,
) -> PromptCost:
    """A prompt of one sequence, in forwards of at most `chunk_tokens`.

    Args:
        resident_share: share of the used experts of each MoE layer that have a slot.
        together: the experts of a layer run for all chunks at once, and so the missing ones cross
            the link once.
        used: distinct experts of each MoE layer that the prompt uses, all chunks together; default
            as many as text would.
    """
    edges = [*range(0, num_tokens, chunk_tokens), num_tokens]
    chunks = list(pairwise(edges))
    passes = [chunks] if together else [[chunk] for chunk in chunks]
    whole = [
        _pass(geometry, rates, chunks=part, share=resident_share, staging=staging, used=used)
        for part in passes
    ]
    return PromptCost(
        stream_ms=sum(cost.stream_ms for cost in whole),
        experts_ms=sum(cost.experts_ms for cost in whole),
        resident_ms=sum(cost.resident_ms for cost in whole),
        attention_ms=sum(cost.attention_ms for cost in whole),
        pointwise_ms=sum(cost.pointwise_ms for cost in whole),
        layers_ms=sum(cost.layers_ms for cost in whole),
        total_ms=sum(cost.total_ms for cost in whole),
        num_passes=len(whole),
    )


def least_prompt_ms(
    geometry: ModelGeometry,
    rates: Rates,
    *,
    num_tokens: int,
    link_bytes: float,
    attention_ms: float,
    streams: bool,
) -> float:
    """Speed of light: what no order of the same copies and products stays below.

    Copies run beside everything, those for the next layers too, so either the link is busy
    throughout or the device is. What is read in place is read by the experts' own kernels, and
    only their products run beside it. Weights are multiplied in 16 bits whatever their format;
    that they are made beforehand and written somewhere is our way, and no part of the bound.

    Args:
        link_bytes: that cross the link.
        attention_ms: of all layers, at the rate that it has alone.
        streams: records are copied, not read in place.
    """
    link = link_bytes / (rates.copy_gbps if streams else rates.link_gbps) / 1e6
    flops = sum(expert_flops(layer) * layer.top_k for layer in geometry.layers) * num_tokens
    products = _flops_ms(flops, rates.gemm_tflops)
    rest = _resident_ms(geometry, rates, num_tokens) + attention_ms
    return max(link, products + rest) if streams else max(link, products) + rest


def text_experts(layer: MoELayer, num_tokens: int) -> float:
    """Distinct experts of a layer that so many neighbouring tokens of text use, expected."""
    last, beyond = _TEXT_TOKENS[-1], num_tokens / _TEXT_TOKENS[-1]
    places = [log2(count) for count in _TEXT_TOKENS]
    alike = float(np.interp(log2(min(num_tokens, last)), places, _AS_INDEPENDENT))
    return distinct_experts(layer, alike * max(1.0, beyond))


def expert_flops(layer: MoELayer) -> int:
    """Operations of one token in one expert: two for each weight of its projections."""
    expert = layer.expert
    halves = 2 if expert.gate.has_gate else 1
    return 2 * (halves + 1) * expert.hidden * expert.intermediate


def resident_flops(geometry: ModelGeometry, num_tokens: int) -> int:
    """Two operations for each weight that is no expert and each token; the head works for the
    last token only."""
    weights = geometry.resident_read_bytes // DTYPE_BYTES[geometry.dtype]
    head = min(weights, geometry.vocab * geometry.hidden)
    return 2 * ((weights - head) * num_tokens + head)


def attention_flops(geometry: ModelGeometry, start: int, end: int) -> int:
    """Scores and weighted sums of tokens start..end-1 over what is before them, windows kept.

    0 where the geometry does not list the attention layers.
    """
    total = 0
    for layer in geometry.attention:
        pairs = sum_of_contexts(end, layer.window) - sum_of_contexts(start, layer.window)
        total += 2 * layer.num_heads * (layer.key_dim + layer.value_dim) * pairs
    return total


def sum_of_contexts(num_tokens: int, window: int | None) -> int:
    """Pairs of a token and one it attends to, itself included."""
    full = num_tokens if window is None else min(num_tokens, window)
    rest = (num_tokens - full) * (window or 0)
    return full * (full + 1) // 2 + rest


@dataclass(frozen=True)
class _Layer:
    """Experts of a layer in one pass.

    Attributes:
        copy_ms: of all that is missing.
        num_groups: in which it comes; 0 where nothing does.
        compute_ms: products and sums.
        foretells: the next layer's records may set off before its routing is known.
    """

    copy_ms: float
    num_groups: int
    compute_ms: float
    foretells: bool


def _pass(
    geometry: ModelGeometry,
    rates: Rates,
    *,
    chunks: Sequence[tuple[int, int]],
    share: Sequence[float],
    staging: Staging,
    used: Sequence[float] | None,
) -> PromptCost:
    """Chunks that run together, layers outermost."""
    tokens = chunks[-1][1] - chunks[0][0]
    streams = staging.streams(tokens)
    rate = rates.copy_gbps if streams else rates.link_gbps
    numbers = used or [text_experts(layer, tokens) for layer in geometry.layers]
    layers = []
    for layer, num, resident in zip(geometry.layers, numbers, share, strict=True):
        missing = num * (1 - resident)
        copy = missing * layer.expert.record_bytes / rate / 1e6
        groups = ceil(missing / staging.buffer_records) if streams else 0
        if streams:
            # Neighbours go in one copy, which ends where the next expert is not missing.
            copy += (groups + missing * (1 - missing / layer.num_experts)) * COPY_US / 1e3
        largest = max(end - start for start, end in chunks)
        compute = _experts_ms(layer, rates, tokens, num, largest)
        compute += _dequantise_ms(layer, rates, largest, num)
        compute += _sums_ms(layer, rates, tokens, groups)
        layers.append(_Layer(copy, groups, compute, num >= PREFETCH_SHARE * layer.num_experts))
    resident_ms = sum(_resident_ms(geometry, rates, end - start) for start, end in chunks)
    attention = sum(_attention_ms(geometry, rates, start, end) for start, end in chunks)
    pointwise = _pointwise_bytes(geometry) * tokens / rates.hbm_gbps / 1e6
    num_later = sum(start > 0 for start, _ in chunks)
    chunks_us = len(chunks) * rates.prompt_layer_us + num_later * CHUNK_US
    overhead = geometry.num_layers * chunks_us / 1e3
    between = (resident_ms + attention + pointwise + overhead) / len(layers)
    return PromptCost(
        stream_ms=sum(layer.copy_ms for layer in layers),
        experts_ms=sum(layer.compute_ms for layer in layers),
        resident_ms=resident_ms,
        attention_ms=attention,
        pointwise_ms=pointwise,
        layers_ms=overhead,
        total_ms=_streamed_ms(layers, between) if streams else _in_place_ms(layers, between),
        num_passes=1,
    )


def _streamed_ms(layers: Sequence[_Layer], between_ms: float) -> float:
    """The link brings groups into the buffers, the host launches their products, the device runs
    them, each in turn.

    A group sets off when the link is free and its buffer has been computed on; the first ones of a
    layer that was not foretold, when its tokens have been routed. Until then the host waits too. A
    group's products begin when it is there, they are launched, and those before them are done.
    """
    link = device = 0.0
    computed = deque([0.0] * NUM_BUFFERS)  # when each buffer is free again
    foretold = False
    for layer in layers:
        device += between_ms
        known, host = 0.0 if foretold else device, device
        for _ in range(layer.num_groups):
            link = max(link, computed.popleft(), known) + layer.copy_ms / layer.num_groups
            host += GROUP_US / 1e3
            device = max(device, link, host) + layer.compute_ms / layer.num_groups
            computed.append(device)
        if not layer.num_groups:
            device += layer.compute_ms
        foretold = layer.foretells
    return device


def _in_place_ms(layers: Sequence[_Layer], between_ms: float) -> float:
    return sum(between_ms + max(layer.copy_ms, layer.compute_ms) for layer in layers)


def _experts_ms(
    layer: MoELayer, rates: Rates, num_tokens: int, num_used: float, largest_chunk: int
) -> float:
    """Products of all tokens of a pass: its chunks' tokens are one block to an expert."""
    rows = num_tokens * layer.top_k + num_used * EXPERT_ROWS / 2
    flops = _flops_ms(expert_flops(layer) * rows, rates.expert_tflops or rates.gemm_tflops)
    read = layer.expert.as_plain() if _is_dequantised(layer, largest_chunk) else layer.expert
    return max(flops, num_used * read.record_bytes / rates.hbm_gbps / 1e6)


def _sums_ms(layer: MoELayer, rates: Rates, num_tokens: int, num_groups: int) -> float:
    """Outputs and running sums, in as many ranges of experts as groups come over the link and
    outputs fill the room that there is for them. Of 30B-A3B's 8 choices on an H200, at 8,192 and
    32,768 tokens: 0.245 ms in 5 ranges, 0.367 in 14, 1.32 in 13, 1.49 in 19."""
    num_ranges = num_groups + ceil(num_tokens / block_tokens(layer.expert, layer.top_k))
    touched = num_ranges * (1 - (1 - 1 / num_ranges) ** layer.top_k)
    numbers = (layer.top_k + 2 * touched) * layer.expert.hidden * num_tokens
    return _SUM_BYTES * numbers / rates.hbm_gbps / 1e6


def _dequantise_ms(layer: MoELayer, rates: Rates, largest_chunk: int, num_used: float) -> float:
    """Records read and plain ones written, once for all chunks that multiply with these."""
    if not _is_dequantised(layer, largest_chunk):
        return 0.0
    return num_used * dequantise_bytes(layer.expert) / rates.hbm_gbps / 1e6


def _is_dequantised(layer: MoELayer, num_tokens: int) -> bool:
    """Whether the first block of so many tokens, the largest, has its weights made beforehand."""
    block = min(num_tokens, block_tokens(layer.expert, layer.top_k))
    return DequantiseRule().pays(
        block, spec=layer.expert, top_k=layer.top_k, num_experts=layer.num_experts
    )


def _resident_ms(geometry: ModelGeometry, rates: Rates, num_tokens: int) -> float:
    read = geometry.resident_read_bytes / rates.hbm_gbps / 1e6
    return max(read, _flops_ms(resident_flops(geometry, num_tokens), rates.gemm_tflops))


def _attention_ms(geometry: ModelGeometry, rates: Rates, start: int, end: int) -> float:
    rate = rates.attention_tflops or rates.gemm_tflops
    if start:
        rate = rates.attention_past_tflops or rate
    return _flops_ms(attention_flops(geometry, start, end), rate)


def _pointwise_bytes(geometry: ModelGeometry) -> float:
    """Of one token, all layers."""
    width = 2 * geometry.hidden * geometry.num_layers
    width += sum((x.num_heads + x.num_kv_heads) * x.key_dim for x in geometry.attention)
    return POINTWISE_BYTES * width


def _flops_ms(flops: float, tflops: float | None) -> float:
    """Without a rate of matrix products they are taken as hidden behind the bytes."""
    return 0.0 if tflops is None else flops / tflops / 1e9
