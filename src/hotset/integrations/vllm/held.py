"""Where captured pieces of a forward read what ran between them: at addresses that stay.

vLLM captures a piece of a forward with the addresses of its inputs, and replays it without looking
at them again. What attention writes lies in a captured piece's memory; the outputs of a layer of
experts, which runs outside, are new tensors each time, so they are copied to memory that is held.
Knows nothing of vLLM, of experts or of devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class HeldOutputs:
    """The outputs of one layer.

    Attributes:
        max_tokens: of the largest captured batch; 0 where nothing is captured.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._held: list[torch.Tensor] | None = None

    def hold(
        self, outputs: Sequence[torch.Tensor], *, is_read_by_graph: bool
    ) -> list[torch.Tensor]:
        """The same values, at the same addresses for every number of tokens if a graph reads them.

        Memory is taken with the first call, so that a step which measures memory finds it taken.

        Args:
            outputs: [T, ...] each; the same number, widths and dtypes in every call.
            is_read_by_graph: whether what follows is captured or replayed.
        """
        if not self.max_tokens:
            return list(outputs)
        if self._held is None:
            self._held = [one.new_empty(self.max_tokens, *one.shape[1:]) for one in outputs]
        if not is_read_by_graph:
            return list(outputs)
        assert len(outputs) == len(self._held), "a layer's outputs changed their number"
        return [held[: len(one)].copy_(one) for held, one in zip(self._held, outputs, strict=True)]
