"""What a scheduler runs, handed to it: rows and their steps, prompts, draws.

Knows what they are; nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from hotset.runtime.rows import Rows
from hotset.runtime.sampling import Sampler
from hotset.runtime.sequences import Sequence
from hotset.runtime.steps import Steps

# (sequence, the ids that it takes in, called between layers) -> logits of the last id, [V]
TakeIn = Callable[[Sequence, list[int], Callable[[], None] | None], torch.Tensor]


@dataclass(frozen=True)
class Parts:
    """What a scheduler runs.

    Attributes:
        rows: sequences and their decode steps.
        steps: the books, and the lock of the engine.
        sampler: of these rows.
        take_in: runs a prompt, within `Steps.exclusive`.
        room: called with the tokens of a step: within it, memory that runs out is explained.
        device: of the model.
        vocab: ids are below it.
        context_tokens: longest prompt and answer together.
        prefill_share: see `PromptShare`.
    """

    rows: Rows
    steps: Steps
    sampler: Sampler
    take_in: TakeIn
    room: Callable[[int], AbstractContextManager[None]]
    device: torch.device
    vocab: int
    context_tokens: int
    prefill_share: float
