"""From logits to a token id, on the device of the logits, repeatable for a seed.

The filters are transformers' own logits warpers; here is only their order and the draw.
"""

from __future__ import annotations

from typing import cast

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hotset.core.errors import RequestError
from hotset.core.request import SamplingParams


class Sampler:
    """Draws the tokens of one request.

    Args:
        params: how.
        device: of the logits; a seed gives the same tokens on the same kind of device.
    """

    def __init__(self, params: SamplingParams, *, device: torch.device) -> None:
        self._params = params
        self._generator = torch.Generator(device)
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)
        self._warpers = LogitsProcessorList()
        if not params.greedy:
            self._warpers.append(TemperatureLogitsWarper(float(params.temperature)))
        if params.top_k > 0:
            self._warpers.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1.0:
            self._warpers.append(TopPLogitsWarper(params.top_p))
        if params.min_p > 0.0:
            self._warpers.append(MinPLogitsWarper(params.min_p))

    def sample(self, logits_V: torch.Tensor) -> int:
        """The next token id for logits [V] of any float dtype.

        Raises:
            RequestError: a logit is NaN or infinite, so whatever was drawn would mean nothing.
        """
        scores = logits_V.float().unsqueeze(0)
        finite = torch.isfinite(scores).all()
        if self._params.greedy:
            token = scores.argmax(dim=-1)
        else:
            # No warper of these looks at the ids so far.
            ids = cast(torch.LongTensor, torch.empty((1, 0), dtype=torch.long))
            # Only differences count, and those to the largest do not overflow when they are
            # divided by a small temperature.
            scores = scores - scores.amax()
            scores = self._warpers(ids, cast(torch.FloatTensor, scores))
            probs = torch.softmax(scores, dim=-1)
            safe = torch.where(finite, probs, torch.ones_like(probs))
            token = torch.multinomial(safe, 1, generator=self._generator).view(-1)
        token_id, is_finite = torch.stack([token[0], finite.to(token.dtype)]).tolist()
        if not is_finite:
            raise RequestError(
                "the model's logits are not finite",
                hint="run `hotset verify MODEL`; in float16 the activations may overflow: "
                "try `--dtype bfloat16`",
            )
        return int(token_id)
