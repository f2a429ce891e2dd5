"""What the cache tests share: stock generation to compare with, and what still counts as equal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hotset.core.geometry import AttentionLayer, StateLayer
from hotset.kernels.attention import AttentionKernels
from hotset.models.attention import AttentionSwitch
from hotset.models.attention_probe import find_attention
from hotset.runtime.kv_cache import DecodeBatch, KVCache
from hotset.runtime.kv_pool import KVPool
from hotset.runtime.kv_prefill import PrefillStep
from tiny import build_tiny, tiny_config

EPS32 = 2.0**-23
KERNELS = AttentionKernels("reference")
# One shorter than every window (16) and block (8), one longer than both.
PROMPTS = [list(range(3, 8)), list(range(9, 42))]


def make_model(name: str) -> Any:
    """A tiny model by type; `mixtral` has a window, and gemma2 (dense) caps its scores."""
    if name == "gemma2":
        sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = AutoConfig.for_model(
            "gemma2",
            **sizes,
            vocab_size=128,
            hidden_size=32,
            intermediate_size=48,
            head_dim=8,
            sliding_window=16,
            attn_logit_softcapping=2.0,
            attn_implementation="eager",  # `sdpa` refuses a cap
        )
        return build_tiny(name, config=config)
    config = tiny_config(name)
    if name == "mixtral":
        config.sliding_window = 16
    return build_tiny(name, config=config)


@dataclass
class Stock:
    """A model, and what it generates greedily with the library's own cache.

    Attributes:
        layers, states: what was found about it.
        prompts: token ids of each sequence.
        tokens: what follows, the same number for each.
        logits: [number of tokens, V] of each sequence.
    """

    model: Any
    layers: tuple[AttentionLayer, ...]
    prompts: list[list[int]]
    states: tuple[StateLayer, ...] = ()
    tokens: list[list[int]] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


@torch.no_grad()
def generate_stock(
    name: str, prompts: list[list[int]], num_tokens: int, *, config: Any = None
) -> Stock:
    """Args:
    config: instead of that of `make_model`.
    """
    model = make_model(name) if config is None else build_tiny(name, config=config)
    found = find_attention(model)
    assert found.ok, found.reason
    stock = Stock(model, found.layers, prompts, states=found.states)
    for prompt in prompts:
        cache, ids, tokens, logits = DynamicCache(config=model.config), prompt, [], []
        for _ in range(num_tokens):
            out = model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True)
            logits.append(out.logits[0, -1])
            ids = [int(logits[-1].argmax())]
            tokens += ids
        stock.tokens.append(tokens)
        stock.logits.append(torch.stack(logits))
    return stock


class Ours:
    """The same model over a pool of NaNs: prefill row by row, decode of all rows together."""

    def __init__(
        self, stock: Stock, *, num_rows: int, layers: tuple[AttentionLayer, ...] | None = None
    ) -> None:
        self.model, self.switch = stock.model, AttentionSwitch(stock.model)
        self.pool = KVPool(
            layers or stock.layers,
            stock.states,
            num_rows=num_rows,
            num_places=4,
            context_tokens=96,
            dtype=torch.float32,
            device=torch.device("cpu"),
            block_tokens=8,
            poison=True,
        )

    @torch.no_grad()
    def prefill(self, row: int, ids: list[int], chunk: int | None = None) -> torch.Tensor:
        """Logits of every token, [T, V]."""
        size, parts = chunk or len(ids), []
        for start in range(0, len(ids), size):
            part = ids[start : start + size]
            step = PrefillStep(self.pool, row, len(part), kernels=KERNELS)
            with self.switch.decode():
                out = self.model(
                    input_ids=torch.tensor([part]),
                    position_ids=step.position_ids,
                    past_key_values=KVCache(step),
                    use_cache=True,
                )
            step.commit()
            parts.append(out.logits[0])
        return torch.cat(parts)

    @torch.no_grad()
    def decode(self, batch: DecodeBatch, cache: KVCache, tokens: list[int]) -> torch.Tensor:
        """Logits of one more token in each place, [B, V]."""
        batch.begin_step()
        batch.advance()
        with self.switch.decode():
            out = self.model(
                input_ids=torch.tensor(tokens)[:, None],
                position_ids=batch.position_ids_B1,
                past_key_values=cache,
                use_cache=True,
            )
        batch.put_back()
        return out.logits[:, -1]


def decode_both(
    stock: Stock, ours: Ours, *, chunk: int | None = None, kernels: AttentionKernels = KERNELS
) -> list[torch.Tensor]:
    """Logits of both sequences, [number of tokens, V]; the stock tokens are fed to both."""
    rows = [ours.pool.open() for _ in PROMPTS]
    logits = [
        [ours.prefill(row, prompt, chunk)[-1]] for row, prompt in zip(rows, PROMPTS, strict=True)
    ]
    batch = DecodeBatch(ours.pool, 4, kernels=kernels)
    batch.assign([rows[1], None, rows[0]])  # padding in the middle and at the end
    cache = KVCache(batch)
    for step in range(len(stock.tokens[0]) - 1):
        fed = [stock.tokens[1][step], 0, stock.tokens[0][step], 0]
        out_BV = ours.decode(batch, cache, fed)
        logits[1].append(out_BV[0])
        logits[0].append(out_BV[2])
    return [torch.stack(parts) for parts in logits]


def assert_own_bits(stock: Stock) -> None:
    """The bits of a row are its own, whatever it shares the batch and the pool with."""
    ours = Ours(stock, num_rows=2)

    def run(row: int, place: int) -> torch.Tensor:
        batch = DecodeBatch(ours.pool, 2, kernels=KERNELS)
        ours.prefill(row, PROMPTS[1])
        rows: list[int | None] = [None, None]
        rows[place] = row
        batch.assign(rows)
        cache = KVCache(batch)
        return torch.stack(
            [ours.decode(batch, cache, [token] * 2)[place] for token in stock.tokens[1]]
        )

    row = ours.pool.open()
    first = run(row, 0)
    ours.pool.close(row)
    other = ours.pool.open()
    ours.prefill(other, PROMPTS[0])
    assert torch.equal(run(ours.pool.open(), 1), first)


def largest_difference(stock: Stock, logits: list[torch.Tensor]) -> float:
    pairs = zip(logits, stock.logits, strict=True)
    return max(float((ours - theirs).abs().max().nan_to_num(torch.inf)) for ours, theirs in pairs)


def logits_bound(stock: Stock, num_draws: int = 5) -> float:
    """How far logits may differ when attention and linear layers err as FP32 allows.

    Found on the model itself: random errors as large as both sides may make are added to every
    output of the stock layers, and four times the largest change of a logit is taken. Right
    implementations err less, in few places. Of several draws it is the median: one in which a
    router's near tie turns over tells nothing of that size.
    """
    generator, largest = torch.Generator().manual_seed(0), 0.0
    for prompt, tokens in zip(stock.prompts, stock.tokens, strict=True):
        ids, changes = torch.tensor([[*prompt, *tokens[:-1]]]), []
        with torch.no_grad():
            exact = stock.model(input_ids=ids).logits
            for _ in range(num_draws):
                with _erring(stock.model, generator):
                    changes.append((stock.model(input_ids=ids).logits - exact).abs().max())
        largest = max(largest, float(torch.stack(changes).median()))
    return 4 * largest


def _erring_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, Any]:
    is_eager = module.config._attn_implementation == "eager"
    stock = _EAGER[type(module).__module__] if is_eager else sdpa_attention_forward
    out, weights = stock(module, query, key, value, attention_mask, **arguments)
    # Weights err by what scores err by, some eps of sum |q||k|; a sum of n terms by sqrt(n) eps.
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    score = float((query.abs() @ keys.abs().transpose(2, 3)).max() * arguments["scaling"])
    error = EPS32 * (2 * score + 8 + key.shape[2] ** 0.5) * float(value.abs().max())
    noise = torch.rand(out.shape, generator=module.erring) * 2 - 1
    return out + 2 * error * noise, weights


# Modeling file -> its own attention function, while an erring one is in its place.
_EAGER: dict[str, Any] = {}


@contextmanager
def _erring(model: nn.Module, generator: torch.Generator) -> Iterator[None]:
    def add_error(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        size = nn.functional.linear(inputs[0].abs(), module.weight.abs())
        noise = torch.rand(output.shape, generator=generator) * 2 - 1
        return output + 2 * EPS32 * module.in_features**0.5 * size * noise

    hooks = []
    for module in model.modules():
        object.__setattr__(module, "erring", generator)
        if isinstance(module, nn.Linear):
            hooks.append(module.register_forward_hook(add_error))
    # Under their own names, by which indexers make their mask.
    config: Any = model.config
    if config._attn_implementation == "eager":
        file, name = sys.modules[type(model).__module__], "eager_attention_forward"
        _EAGER[file.__name__] = getattr(file, name)
        with patch.object(file, name, _erring_attention):
            yield
    else:
        with patch.dict(AttentionInterface._global_mapping, {"sdpa": _erring_attention}):
            yield
    for hook in hooks:
        hook.remove()
