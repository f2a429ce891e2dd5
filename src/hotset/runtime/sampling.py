"""The sampler of an engine's rows: parameters at fixed addresses, one more draw each step.

What a draw is, filters included, is `kernels.sample_reference`'s business; here is only which
parameters a row has, and that the same seed, position and logits give the same token on any
device and in any batch.
"""

from __future__ import annotations

import secrets

import torch

from hotset.core.errors import RequestError
from hotset.core.request import SamplingParams
from hotset.kernels.sample import SampleBuffers, sample
from hotset.kernels.sample_reference import SampleParams

_SEED_BITS = 62


class Sampler:
    """Draws tokens for up to B rows.

    Args:
        num_rows: B.
        vocab: V, logits of a row.
        device: of the logits.
    """

    def __init__(self, num_rows: int, vocab: int, *, device: torch.device) -> None:
        self._vocab = vocab
        self._buffers = SampleBuffers.make(num_rows, vocab, device=device)
        self._params = SampleParams.greedy(num_rows, device=device)

    def start(self, row: int, params: SamplingParams) -> None:
        """A new answer in a row; its first draw is number 0."""
        seed = secrets.randbits(_SEED_BITS) if params.seed is None else params.seed
        own = self._params
        own.temperature_B[row] = params.temperature
        own.top_k_B[row] = min(params.top_k, self._vocab)  # an int32, whatever was asked
        own.top_p_B[row] = params.top_p
        own.min_p_B[row] = params.min_p
        own.seed_B[row] = seed
        own.position_B[row] = 0

    def __call__(self, logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One draw for each of the first rows, without waiting for the device.

        Returns:
            Token ids [B] int64, and whether the row's logits are all finite [B] bool; overwritten
            by the next call.
        """
        num_rows = len(logits_BV)
        drawn = sample(logits_BV, self._params, buffers=self._buffers)
        self._params.position_B[:num_rows] += 1
        return drawn

    def draw(self, logits_V: torch.Tensor) -> int:
        """The next token of row 0, which the host waits for.

        Raises:
            RequestError: a logit is NaN or infinite.
        """
        token_B, finite_B = self(logits_V[None])
        token, finite = torch.stack([token_B[0], finite_B[0].to(token_B.dtype)]).tolist()
        return require_finite(token, finite=bool(finite))


def require_finite(token: int, *, finite: bool) -> int:
    """The token, if the logits that it was drawn from are finite.

    Raises:
        RequestError: a logit is NaN or infinite, so whatever was drawn would mean nothing.
    """
    if not finite:
        raise RequestError(
            "the model's logits are not finite",
            hint="run `hotset verify MODEL`; in float16 the activations may overflow: "
            "try `--dtype bfloat16`",
        )
    return token
