"""Which rows of a batch are padding, and so need no expert.

vLLM fills a batch up to the next captured size, and routes what it filled it with. Knows where
vLLM says how many rows are real: in a mask on the device, or as a number in the attention's
metadata, depending on version and runner. Neither makes the host wait for the device.
"""

from __future__ import annotations

import torch
from vllm import envs
from vllm.forward_context import ForwardContext

NO_EXPERT = -1


def kept_ids(ids_TK: torch.Tensor, context: ForwardContext) -> torch.Tensor:
    """A copy of the routed ids, [T, K] int32, with `NO_EXPERT` in rows of padding.

    Where vLLM does not say which these are, they keep the experts that they were routed to.
    """
    # vLLM keeps the mask up to date where it uses it itself, and only there.
    if context.is_padding is not None and envs.VLLM_MOE_SKIP_PADDING:
        is_padding_T1 = context.is_padding[: len(ids_TK), None]
        return torch.where(is_padding_T1, NO_EXPERT, ids_TK).to(torch.int32)
    kept_TK = ids_TK.to(torch.int32, copy=True)
    num_real = _num_real_tokens(context)
    if num_real is not None and num_real < len(kept_TK):
        kept_TK[num_real:] = NO_EXPERT
    return kept_TK


def _num_real_tokens(context: ForwardContext) -> int | None:
    """Of the attention's metadata, which no piecewise graph pads; `None` without any."""
    metadata = context.attn_metadata
    if not isinstance(metadata, dict):  # none at all, or two half steps
        return None
    counts = (getattr(one, "num_actual_tokens", None) for one in metadata.values())
    return next((count for count in counts if count is not None), None)
