"""From how many tokens it pays to dequantise experts beforehand: `core.staging.DEQUANTISE_TOKENS`.

    python benchmarks/dequantise_table.py [--tokens 64 256 ...] [--formats int4 ...]

For each format and number of tokens: us a layer with quantised records made into weights in
registers, and with weights written first and multiplied then. Both outputs are compared before
they are timed. All experts lie in device memory: over the link both read the same bytes. The last
lines say where the second way begins to be the faster one, in tokens an expert.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

from hotset.bench.random_records import fill_random
from hotset.bench.timing import capture, time_ms
from hotset.core.formats import USUAL
from hotset.core.geometry import ExpertSpec, Gate, GateForm, MoELayer
from hotset.core.staging import block_tokens
from hotset.kernels.dispatch import Kernels, select_kernels
from hotset.kernels.launch import token_block
from hotset.runtime.block_sums import ManyTokens
from hotset.runtime.blocks import Block
from hotset.runtime.dequantised import DequantisedExperts

# Qwen3-30B-A3B; on a CPU so little that a run takes seconds.
SHAPES = {"cuda": (128, 8, 2048, 768), "cpu": (8, 2, 128, 64)}
TOKENS = {"cuda": (64, 256, 512, 1024, 2048, 4096), "cpu": (16, 64)}
NUM_LAYERS = 2
REPEATS = 5


class Layers:
    """A few layers of random experts of one format, and inputs for them."""

    def __init__(self, name: str, kernels: Kernels, device: torch.device) -> None:
        num_experts, self.top_k, hidden, intermediate = SHAPES[device.type]
        self.kernels, self.device = kernels, device
        self.spec = ExpertSpec.build(
            hidden=hidden,
            intermediate=intermediate,
            gate=Gate(GateForm.PLAIN),
            has_bias=False,
            dtype="bfloat16",
            weights=USUAL[name],
        )
        self.layer = MoELayer("layer", num_experts, self.top_k, self.spec)
        generator = torch.Generator(device).manual_seed(0)
        self.records = [
            torch.zeros(num_experts, self.spec.record_bytes, dtype=torch.uint8, device=device)
            for _ in range(NUM_LAYERS)
        ]
        for records_ED in self.records:
            fill_random(records_ED, self.spec, generator)

    def blocks(self, num_tokens: int) -> list[Block]:
        """A block for each layer, evenly routed."""
        generator = torch.Generator(self.device).manual_seed(num_tokens)
        made = []
        for _ in self.records:
            draws_TE = torch.rand(
                num_tokens, self.layer.num_experts, generator=generator, device=self.device
            )
            weights_TK, ids_TK = draws_TE.topk(self.top_k)
            x_TH = torch.randn(
                num_tokens, self.spec.hidden, generator=generator, device=self.device
            )
            made.append(Block(x_TH.bfloat16(), ids_TK, weights_TK.bfloat16()))
        return made

    def run(self, blocks: Sequence[Block], *, dequantise: bool) -> list[torch.Tensor]:
        """Every layer's output, one way or the other."""
        return [
            self._layer(records_ED, block, dequantise=dequantise)
            for records_ED, block in zip(self.records, blocks, strict=True)
        ]

    def _layer(self, records_ED: torch.Tensor, block: Block, *, dequantise: bool) -> torch.Tensor:
        num_experts = len(records_ED)
        places_E = torch.arange(num_experts, device=self.device) * records_ED.stride(0)
        sums = ManyTokens(
            self.kernels,
            self.spec.as_plain() if dequantise else self.spec,
            [block],
            num_experts=num_experts,
            kernel_tokens=token_block(block.num_tokens, self.top_k, num_experts),
            most_rows=block_tokens(self.spec, self.top_k) * self.top_k,
            post_norm=None,
        )
        adds = (
            DequantisedExperts(self.kernels, self.layer, [sums], self.device)
            if dequantise
            else sums
        )
        adds.add(places_E + records_ED.data_ptr(), first=0, stop=num_experts)
        return sums.total()


def relative(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Largest difference over the root mean square."""
    pairs = list(zip(got, want, strict=True))
    return max(float((a - b).abs().max() / b.float().square().mean().sqrt()) for a, b in pairs)


def measure(layers: Layers, num_tokens: int) -> tuple[float, float, float]:
    """Difference of both ways, and us a layer of each."""
    blocks = layers.blocks(num_tokens)
    ways: list[Callable[[], list[torch.Tensor]]] = [
        partial(layers.run, blocks, dequantise=dequantise) for dequantise in (False, True)
    ]
    in_registers, beforehand = (way() for way in ways)
    difference = relative(beforehand, in_registers)
    # Both multiply weights that were rounded to BF16 once, and differ at most in the order of FP32
    # sums, which may move an activation or an output to the next BF16: 2^-7 of a value of up to
    # five times the root mean square. Control: the tokens of another block.
    assert difference < 2**-4, difference
    assert relative(layers.run(layers.blocks(num_tokens)[::-1], dequantise=True), beforehand) > 1
    first, second = (median_us(way, layers.device) / NUM_LAYERS for way in ways)
    return difference, first, second


def median_us(way: Callable[[], object], device: torch.device) -> float:
    """Of a few replays."""
    times = time_ms(capture(way, device=device), device=device, repeats=REPEATS)
    return sorted(times)[REPEATS // 2] * 1e3


def threshold(rows: Sequence[tuple[float, float, float]]) -> float:
    """Where the second time falls below the first for good, between the rows by logarithms.

    Args:
        rows: (tokens an expert, us in registers, us beforehand), ascending.
    """
    slower = [index for index, (_, first, second) in enumerate(rows) if second >= first]
    if not slower:
        return rows[0][0]
    if slower[-1] == len(rows) - 1:
        return math.inf
    (x0, a0, b0), (x1, a1, b1) = rows[slower[-1] : slower[-1] + 2]
    gain0, gain1 = math.log(a0 / b0), math.log(a1 / b1)
    return x0 * math.exp(math.log(x1 / x0) * -gain0 / (gain1 - gain0))


def say(line: str) -> None:
    """A line of the output, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Prints the table and the thresholds."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = [name for name, form in USUAL.items() if not form.is_plain]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS[device.type])
    parser.add_argument("--formats", nargs="+", choices=names, default=names)
    wanted = parser.parse_args()
    kernels = select_kernels(device)
    say("format    tokens  an expert  in registers  beforehand     gain  difference")
    found = {}
    for name in wanted.formats:
        layers, rows = Layers(name, kernels, device), []
        for num_tokens in sorted(wanted.tokens):
            share = num_tokens * layers.top_k / layers.layer.num_experts
            difference, first, second = measure(layers, num_tokens)
            rows.append((share, first, second))
            say(
                f"{name:9}{num_tokens:7}{share:11.1f}{first:11.1f} us{second:9.1f} us"
                f"{first / second:9.2f}{difference:12.2g}"
            )
        found[name] = threshold(rows)
    for name, tokens in found.items():
        say(f"{name}: beforehand from {tokens:.0f} tokens an expert")


if __name__ == "__main__":
    main()
