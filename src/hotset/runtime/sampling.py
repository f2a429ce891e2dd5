"""The sampler of an engine's rows: what each asked for at fixed addresses, one more draw each step.

What a draw is stands in the kernels' specifications (`sample_reference`, `sample_adjust_reference`,
`sample_report_reference`); here is only which row asks for what. The same request, seed and logits
give the same tokens on any device, in any batch and at any place of it. Knows token ids and rows,
nothing of text or of why an answer ends.

Letters: B places of a step, R rows (one for each answer that is being generated), V vocabulary.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hotset.core.errors import RequestError
from hotset.core.request import SamplingParams, TokenLogprobs, TokenMatcher
from hotset.kernels.sample import SampleBuffers, sample
from hotset.kernels.sample_adjust import adjust
from hotset.kernels.sample_adjust_reference import Adjustments, num_words
from hotset.kernels.sample_reference import Adjusted, SampleParams
from hotset.kernels.sample_report import ReportBuffers, report
from hotset.kernels.sample_report_reference import (
    FINITE,
    LOGPROB,
    REPORT_WIDTH,
    TOKEN,
    TOP_IDS,
    TOP_LOGPROBS,
)

__all__ = ["REPORT_WIDTH", "TOKEN", "Draw", "Sampler", "read_draws"]

_SEED_BITS = 62


@dataclass(frozen=True)
class Draw:
    """What one row drew in a step.

    Attributes:
        report_W: int64, its line of the step's report.
    """

    report_W: NDArray[np.int64]

    @property
    def token(self) -> int:
        return int(self.report_W[TOKEN])

    @property
    def finite(self) -> bool:
        return bool(self.report_W[FINITE])

    def require_finite(self) -> int:
        """The token, if the logits that it was drawn from are finite.

        Raises:
            RequestError: a logit is NaN or infinite, or every token is forbidden, so that whatever
                was drawn would mean nothing.
        """
        if not self.finite:
            raise RequestError(
                "the model's logits are not finite",
                hint="run `hotset verify MODEL`; in float16 the activations may overflow: "
                "try `--dtype bfloat16`",
            )
        return self.token

    def logprobs(self, num_top: int) -> TokenLogprobs:
        """Of the token and of the `num_top` likeliest; only of a row that asked for them."""
        ids = self.report_W[TOP_IDS : TOP_IDS + num_top]
        values = _floats(self.report_W[TOP_LOGPROBS : TOP_LOGPROBS + num_top])
        top = zip(ids.tolist(), values, strict=True)
        own = _floats(self.report_W[LOGPROB : LOGPROB + 1])[0]
        return TokenLogprobs(own, tuple((token, value) for token, value in top if token >= 0))


def _floats(bits: NDArray[np.int64]) -> list[float]:
    values: list[float] = bits.astype(np.int32).view(np.float32).tolist()
    return values


def read_draws(report_BW: NDArray[np.int64]) -> list[Draw]:
    """The draws of a step's places, from the host's copy of its report."""
    return [Draw(report_W) for report_W in report_BW.reshape(-1, REPORT_WIDTH)]


class Sampler:
    """Draws tokens for up to R rows, in steps of up to R places.

    Args:
        num_rows: R.
        vocab: V, logits of a row.
        device: of the logits.
    """

    def __init__(self, num_rows: int, vocab: int, *, device: torch.device) -> None:
        self._vocab, self._num_rows = vocab, num_rows
        self._buffers = SampleBuffers.make(num_rows, vocab, device=device)
        self._reports = ReportBuffers.make(num_rows, vocab, device=device)
        self._adjusted_BV = torch.zeros(num_rows, vocab, device=device)
        # One row more than answers: that of padded places.
        self._params = SampleParams.greedy(num_rows + 1, device=device)
        self._adjustments = Adjustments.off(num_rows, vocab, num_padding=1, device=device)
        self._wants_logprobs_R = torch.zeros(num_rows + 1, dtype=torch.bool, device=device)
        self._each_row_R = torch.arange(num_rows, device=device)
        self._asked: list[SamplingParams] = [SamplingParams()] * num_rows
        self._matchers: list[TokenMatcher | None] = [None] * num_rows
        self._masks_RW = torch.zeros(
            num_rows, num_words(vocab), dtype=torch.int32, pin_memory=device.type == "cuda"
        )

    def start(
        self,
        row: int,
        params: SamplingParams,
        *,
        prompt_ids: Sequence[int] = (),
        matcher: TokenMatcher | None = None,
    ) -> None:
        """A new answer in a row, which is in no step that is queued; its first draw is number 0.

        Args:
            row: of R.
            params: what it asks for.
            prompt_ids: of the request; the repetition penalty counts them.
            matcher: what its tokens have to follow.

        Raises:
            RequestError: a bias of an id that is not in the vocabulary.
        """
        params.check_vocab(self._vocab)
        self._asked[row], self._matchers[row] = params, matcher
        seed = secrets.randbits(_SEED_BITS) if params.seed is None else params.seed
        own = self._params
        own.temperature_B[row] = params.temperature
        own.top_k_B[row] = min(params.top_k, self._vocab)  # an int32, whatever was asked
        own.top_p_B[row] = params.top_p
        own.min_p_B[row] = params.min_p
        own.seed_B[row] = seed
        own.position_B[row] = 0
        self._wants_logprobs_R[row] = params.logprobs is not None
        adjusts = params.changes_logits or matcher is not None
        self._adjustments.is_on_R[row] = adjusts
        if adjusts:
            self._start_adjusting(row, params, prompt_ids)

    def _start_adjusting(self, row: int, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        own = self._adjustments
        own.generated_RV[row].zero_()
        own.bias_RV[row].zero_()
        own.prompted_RV[row].zero_()
        own.repetition_R[row] = params.repetition_penalty
        own.frequency_R[row] = params.frequency_penalty
        own.presence_R[row] = params.presence_penalty
        device = own.bias_RV.device
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=device)
            biases = torch.tensor(
                list(params.logit_bias.values()), dtype=torch.float32, device=device
            )
            own.bias_RV[row].index_copy_(0, ids, biases)
        if params.repetition_penalty != 1.0 and prompt_ids:
            ids = torch.tensor(prompt_ids, dtype=torch.int64, device=device)
            own.prompted_RV[row].index_fill_(0, ids, True)
        own.is_masked_R[row] = self._matchers[row] is not None
        self._send_mask(row)

    def __call__(self, logits_BV: torch.Tensor, rows_B: torch.Tensor) -> torch.Tensor:
        """One draw for each of B places, without waiting for the device.

        Args:
            logits_BV: of a step; any float dtype, places may have any stride.
            rows_B: int64 on the device, the row of each place; R for padding.

        Returns:
            The report of the step, int64 [B, `REPORT_WIDTH`], for `read_draws` once it is on the
            host; its column `TOKEN` is the drawn ids. Overwritten by the next call.
        """
        adjusted_BV = adjust(logits_BV, self._adjustments, rows_B, out=self._adjusted_BV)
        drawn = sample(
            logits_BV,
            self._params,
            rows_B=rows_B,
            adjusted=Adjusted(self._adjustments.is_on_R, adjusted_BV),
            buffers=self._buffers,
        )
        return report(
            logits_BV,
            drawn,
            rows_B=rows_B,
            wants_logprobs_R=self._wants_logprobs_R,
            params=self._params,
            adjustments=self._adjustments,
            buffers=self._reports,
        )

    def draw(self, row: int, logits_V: torch.Tensor) -> Draw:
        """The next token of a row that is in no queued step, which the host waits for."""
        report_1W = self(logits_V[None], self._each_row_R[row : row + 1])
        return read_draws(report_1W.cpu().numpy().copy())[0]

    def logprobs(self, row: int, draw: Draw) -> TokenLogprobs | None:
        """Of a draw of this row; `None` where the row did not ask."""
        num_top = self._asked[row].logprobs
        return None if num_top is None else draw.logprobs(num_top)

    def needs_host(self, row: int, *, num_steps: int) -> bool:
        """Whether the row's next so many steps must not be queued before `accept` has had its last
        token."""
        matcher = self._matchers[row]
        return matcher is not None and matcher.num_free < num_steps

    def accept(self, row: int, token_id: int) -> None:
        """The host knows the row's newest token; what may follow it is sent to the device.

        Raises:
            RequestError: the row's structure cannot be followed any further.
        """
        matcher = self._matchers[row]
        if matcher is not None:
            was_free = matcher.num_free > 0
            matcher.accept(token_id)
            if not (was_free and matcher.num_free > 0) and not matcher.is_complete:
                self._send_mask(row)

    def is_complete(self, row: int) -> bool:
        """Whether the row's structure has ended, so that nothing can follow."""
        matcher = self._matchers[row]
        return matcher is not None and matcher.is_complete

    def _send_mask(self, row: int) -> None:
        """The host's half of the mask is free: the step that read the last one has been waited
        for, or none has read it."""
        matcher = self._matchers[row]
        if matcher is not None:
            matcher.fill_mask(self._masks_RW[row].numpy())
            self._adjustments.mask_RW[row].copy_(self._masks_RW[row], non_blocking=True)
