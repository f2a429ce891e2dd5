"""Tiny checkpoints of every architecture, their engines, and the stock models beside them.

A checkpoint is saved as it is published and loaded twice: by hotset, and by stock transformers with
its plain experts loop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hotset.core.config import EngineConfig
from hotset.core.units import MIB
from hotset.models.load import quiet_transformers
from hotset.models.seam import model_class
from hotset.runtime.engine import Engine
from hotset.runtime.planning import plan_engine
from hotset.runtime.verify import logit_bound
from hotset.runtime.weights import CheckpointWeights
from tiny import VOCAB, save_tiny, tiny_config
from vocabulary import BYTE_VOCAB, TEMPLATE, byte_tokenizer, save_words

# In every run: plain, other key names, interleaved with biases, latents with groups of experts and
# a dense first layer, linear attention, a correction bias with a dense first layer.
SIX = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next", "glm4_moe")

CONTEXT = 64

# The longest period of a recurrence that stock code computes as a block.
PERIOD = 64


@dataclass
class Family:
    """One checkpoint on disk.

    Attributes:
        folder: of the checkpoint.
        source: hotset's view of it.
    """

    folder: Path
    source: CheckpointWeights

    def engine(
        self, *, share: float = 0.5, num_slots: int | None = None, **options: object
    ) -> Engine:
        """An engine on the CPU, free slots poisoned.

        Args:
            share: of the experts, that get a slot; or
            num_slots: so many slots.
            options: of `EngineConfig`.
        """
        sizes = {"context_tokens": CONTEXT, "prefill_chunk": CONTEXT, **options}
        config = EngineConfig(model=str(self.folder), device="cpu", poison=True, **sizes)
        geometry = self.source.geometry
        want = int(share * geometry.num_records) if num_slots is None else num_slots
        assert want <= geometry.num_records
        _, plan = plan_engine(geometry, config)
        step = min(layer.expert.record_bytes for layer in geometry.layers) // 2
        budget = plan.device.total_bytes
        while plan.num_slots < want:  # what goes with slots takes a little too
            budget += max(step, (want - plan.num_slots) * step)
            config = replace(config, vram_bytes=budget)
            _, plan = plan_engine(geometry, config)
        assert plan.num_slots == want
        return Engine(self.source, config)

    def with_dtype(self, dtype: str) -> Family:
        return Family(self.folder, CheckpointWeights(str(self.folder), dtype=dtype))

    def stock(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """Stock transformers with the plain experts loop."""
        with quiet_transformers():
            model: PreTrainedModel = model_class(self.source.config).from_pretrained(
                self.folder, dtype=dtype, experts_implementation="eager", local_files_only=True
            )
        return model.eval()


@dataclass
class Pocket(Family):
    """The embedded model.

    Attributes:
        ids: 257 tokens of a text.
        stock_model: in FP32, with the plain experts loop.
        want_TV: its logits of the text.
    """

    ids: list[int]
    stock_model: PreTrainedModel
    want_TV: torch.Tensor


def open_pocket() -> Pocket:
    """The embedded model in FP32."""
    source = CheckpointWeights("pocket", dtype="float32")
    sample = (resources.files("hotset") / "data" / "verify.txt").read_text(encoding="utf-8")
    family = Family(source.folder, source)
    ids, stock = source.text.encode(sample)[:257], family.stock()
    return Pocket(family.folder, source, ids, stock, stock_logits(stock, ids))


def make_family(model_type: str, folder: Path, **options: object) -> Family:
    """Saves a tiny checkpoint with a tokenizer and opens it."""
    with quiet_transformers():
        save_tiny(model_type, folder, max_shard_size=4 * MIB, **options)  # type: ignore[arg-type]
    save_words(folder, vocab=VOCAB)
    return Family(folder, CheckpointWeights(str(folder)))


def make_chatty(folder: Path, *, template: str | None = TEMPLATE) -> Path:
    """A tiny checkpoint that reads and writes bytes and has a chat template.

    Its end id is 1; random logits hardly ever choose it.
    """
    config = tiny_config("qwen3_moe")
    values = config.to_dict() | {"vocab_size": BYTE_VOCAB, "eos_token_id": 1}
    with quiet_transformers():
        save_tiny("qwen3_moe", folder, config=type(config)(**values))
    byte_tokenizer(template=template).save_pretrained(folder)
    return folder


def text(num_tokens: int, seed: int = 1) -> list[int]:
    """Random ids without the special ones."""
    source = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, VOCAB, (num_tokens,), generator=source).tolist()
    return ids


def stock_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """[T, V] float32 of one forward over a text.

    With the cache that the model makes itself: it is what an engine uses, and a few architectures
    pick other code for it.
    """
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=True).logits[0]
    return logits.float()


def difference(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left.float() - right.float()).abs().max())


def rounding_bound(family: Family, engine: Engine, ids: list[int], want_TV: torch.Tensor) -> float:
    """`logit_bound`, or where a model's own roundings grow more, three times what stock in FP32 is
    off by: its own error, and twice as much of ours.

    muse_spark norms each expert's output, so that small outputs bring their whole relative error.
    """
    bound = logit_bound(engine, want_TV)
    if engine.geometry.model_type != "muse_spark":
        return bound
    with torch.inference_mode():
        exact = family.stock(torch.float64)(input_ids=torch.tensor([ids]), use_cache=True).logits[0]
    own_error = float((want_TV.double() - exact).abs().max())
    assert own_error < 2 * bound, "or stock is not what it is taken for"
    return max(bound, 3 * own_error)


def continuation_bound(engine: Engine, logits_TV: torch.Tensor) -> float:
    """How far a text in several forwards may be from the text in one.

    Attention sums in another order: `logit_bound`. Recurrent layers compute a block of up to
    `PERIOD` tokens through a triangular inverse and a single token directly; every token of the
    block takes up the roundings of those before it, which add up as their square root.
    """
    return PERIOD**0.5 * logit_bound(engine, logits_TV)
