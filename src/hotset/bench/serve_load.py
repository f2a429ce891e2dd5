"""What `bench serve` asks for at the same time, and the engine that has room for it.

Sizes only: rows, context, KV cache and slots follow from streams and tokens. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hotset.bench.random_weights import RandomWeights
from hotset.core.config import EngineConfig
from hotset.core.errors import CapacityError
from hotset.core.policy.adaptive import DEFAULT_HALF_LIFE
from hotset.runtime.decode import MOST_IN_FLIGHT
from hotset.runtime.kv_pool import BLOCK_TOKENS
from hotset.runtime.planning import plan_engine

# Tokens of each stream before the clock starts: two half-lives, so that slots follow the text.
WARM_TOKENS = 2 * int(DEFAULT_HALF_LIFE)
# Most tokens of a stream that runs beside long prompts; many times what these take.
BESIDE_TOKENS = 2048
# Long prompts that are timed one after the other, behind one that is not.
LONG_REPEATS = 3


@dataclass(frozen=True)
class Load:
    """What is asked for.

    Attributes:
        streams: numbers of streams, each a run.
        num_prompt, num_tokens: of each stream.
        num_long: tokens of the prompts that come while streams run; 0 leaves them out.
    """

    streams: tuple[int, ...]
    num_prompt: int
    num_tokens: int
    num_long: int

    @property
    def num_rows(self) -> int:
        """Most requests at a time."""
        return max(*self.streams, self.num_beside + 1 if self.num_long else 0)

    @property
    def num_beside(self) -> int:
        """Streams beside a long prompt: one fewer than the most, so that no step is larger."""
        return max(1, max(self.streams) - 1)

    @property
    def longest(self) -> int:
        """Tokens of the longest answer. In a run without long prompts all streams begin together
        and end behind those that count."""
        alone = WARM_TOKENS + self.num_tokens + MOST_IN_FLIGHT
        return max(alone, BESIDE_TOKENS) if self.num_long else alone

    @property
    def context_tokens(self) -> int:
        """Of the longest request."""
        return max(self.num_prompt + self.longest, self.num_long + 1)

    def config(self, config: EngineConfig) -> EngineConfig:
        """An engine's, with rows and KV cache for all of it."""
        streams = self.num_rows * _in_blocks(self.num_prompt + self.longest)
        return replace(
            config,
            max_batch=self.num_rows,
            context_tokens=self.context_tokens,
            kv_tokens=streams + _in_blocks(self.num_long + 1),
        )


def _in_blocks(num_tokens: int) -> int:
    """Tokens of the KV cache that so many take: whole blocks."""
    return -(-num_tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def with_slots(source: RandomWeights, config: EngineConfig, share: float) -> EngineConfig:
    """The config with as much device memory as that share of all experts in slots takes.

    Raises:
        CapacityError: the device has no room for so many.
    """
    geometry = source.geometry
    _, plan = plan_engine(geometry, config)
    plan.require_fit()
    wanted = round(share * geometry.num_records)
    slot_bytes = max(layer.expert.record_bytes for layer in geometry.layers)
    vram_bytes, num_slots = plan.device.total_bytes, plan.num_slots
    # Fewer slots bring a staging ring, which takes memory in its turn: so not in one step.
    for _ in range(8):
        vram_bytes += (wanted - num_slots) * slot_bytes
        if config.vram_bytes is not None and vram_bytes > config.vram_bytes:
            break
        sized = replace(config, vram_bytes=vram_bytes, prefill_chunk=plan.prefill_chunk)
        num_slots = plan_engine(geometry, sized)[1].require_fit().num_slots
        if num_slots == wanted:
            return sized
    raise CapacityError(
        f"`--slots {share:g}` are {wanted} slots, {num_slots} fit",
        hint="lower `--slots` or what is asked for at once, or cut with `--layers`",
    )


def loads_of(shares: Sequence[float]) -> list[list[float]]:
    """Shares that one loaded engine can run, the largest first in each: those between nothing and
    all. With no slot, or one for every expert, nothing moves, and an engine leaves out what
    would move it."""
    between = sorted({share for share in shares if 0 < share < 1}, reverse=True)
    apart = [[share] for share in sorted(set(shares)) if not 0 < share < 1]
    return [*([between] if between else []), *apart]
