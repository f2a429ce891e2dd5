"""The specification of sampling in torch: filters, weights, noise, and the token they give.

    s_i = x_i / temperature                          FP32
    top-k   keeps i if fewer than k tokens have s_j > s_i
    top-p   keeps i if the tokens with s_j > s_i have less than top_p of what top-k kept
    min-p   keeps i if exp(s_i - max s) >= min_p
    token = argmax over what all three keep of s_i + g_i,  g_i = -log(-log(u_i))

which draws i with probability softmax(s) over what is kept (the Gumbel-max theorem). The filters
and their order are transformers' warpers; equal scores are kept or dropped together, where the
library's top-p may split them. With temperature 0 the token is the argmax of x, the lowest id among
equals, whatever the filters. Adjusted logits (`sample_adjust_reference`) are drawn from in FP32,
but filtered as if rounded to the dtype of the logits; those of -inf are forbidden.

Noise is Philox4x32-10 keyed by seed and counted by (token, position), so a row's draw depends on
its own seed, position and logits alone. Probabilities are whole multiples of 2^-40, and exp and log
are written out in FP32 operations that round alike everywhere: sums do not depend on their order,
and a CPU draws the tokens that a GPU draws from equal logits. Not to be compiled with fused
multiply-add. Knows rows of logits, nothing of requests. Never waits for the device.

Letters: B places of a step, R rows whose parameters are kept, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

WEIGHT_BITS = 40  # times up to 2^22 tokens of weight 1 fit into 63 bits
MIN_TEMPERATURE = 2.0**-100  # keeps logits / temperature finite; any such small one is greedy
MAX_SCORE = 3.0e38
MIN_EXPONENT = -40.0  # below it a weight is 0

# Cephes expf and logf: polynomials for |x| <= ln(2)/2, and for 1 + x in sqrt(1/2)..sqrt(2).
LOG2_E = 1.44269504088896341
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
SQRT_2 = 1.41421356237309505

PHILOX_KEYS = (0x9E3779B9, 0xBB67AE85)
PHILOX_FACTORS = (0xD2511F53, 0xCD9E8D57)
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class SampleParams:
    """How each row is sampled; tensors on the device of the logits, [R], or [B] out of `rows`.

    Attributes:
        temperature_B: float32; 0 is greedy.
        top_k_B: int32; 0 is off.
        top_p_B: float32 in (0, 1]; 1 is off.
        min_p_B: float32 in [0, 1]; 0 is off.
        seed_B: int64, not negative.
        position_B: int64, not negative; different for each token drawn under a seed.
    """

    temperature_B: torch.Tensor
    top_k_B: torch.Tensor
    top_p_B: torch.Tensor
    min_p_B: torch.Tensor
    seed_B: torch.Tensor
    position_B: torch.Tensor

    @classmethod
    def greedy(cls, num_rows: int, *, device: torch.device) -> SampleParams:
        """Greedy rows, to be changed in place."""

        def full(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((num_rows,), value, dtype=dtype, device=device)

        return cls(
            temperature_B=full(0, torch.float32),
            top_k_B=full(0, torch.int32),
            top_p_B=full(1, torch.float32),
            min_p_B=full(0, torch.float32),
            seed_B=full(0, torch.int64),
            position_B=full(0, torch.int64),
        )

    def rows(self, rows_B: torch.Tensor) -> SampleParams:
        """Those of these rows (int64), a copy."""
        return SampleParams(*(getattr(self, field.name)[rows_B] for field in fields(self)))


@dataclass(frozen=True)
class Adjusted:
    """Other logits than the model's, for some rows.

    Attributes:
        is_on_R: bool, which rows draw from them.
        logits_BV: float32, of each place; of other rows anything; -inf is forbidden.
    """

    is_on_R: torch.Tensor
    logits_BV: torch.Tensor


def sample(
    logits_BV: torch.Tensor,
    params: SampleParams,
    *,
    rows_B: torch.Tensor | None = None,
    adjusted: Adjusted | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token_B int64, finite_B bool); see `sample.sample`."""
    if rows_B is None:
        rows_B = torch.arange(len(logits_BV), device=logits_BV.device)
    params = params.rows(rows_B)
    x_BV = logits_BV.float()
    finite_BV = torch.isfinite(x_BV)
    allowed_BV = torch.ones_like(finite_BV)
    if adjusted is not None:
        is_on_B1 = adjusted.is_on_R[rows_B, None]
        x_BV = torch.where(is_on_B1, adjusted.logits_BV, x_BV)
        allowed_BV = ~(is_on_B1 & torch.isneginf(x_BV))
        finite_BV = torch.isfinite(x_BV) | ~allowed_BV
    finite_B = finite_BV.all(1) & allowed_BV.any(1)
    x_BV = torch.where(x_BV == 0, 0.0, x_BV)  # -0 and 0 are equals in every respect
    greedy_B1 = params.temperature_B[:, None] <= 0
    if not x_BV.is_cuda and bool(greedy_B1.all()):  # asking costs nothing here, and saves the rest
        return torch.where(finite_B, _first_best(x_BV), 0), finite_B
    score_BV = torch.where(greedy_B1, x_BV, scores(x_BV, params.temperature_B))
    rounded_BV = x_BV.to(logits_BV.dtype).float()
    kept_BV = greedy_B1 | keep(scores(rounded_BV, params.temperature_B), params)
    kept_BV &= allowed_BV
    tokens_V = torch.arange(x_BV.shape[1], device=x_BV.device)
    words_BV = philox_words(params.seed_B, params.position_B, tokens_V)
    drawn_BV = torch.where(greedy_B1, score_BV, score_BV + gumbel(words_BV))
    drawn_BV = torch.where(kept_BV, drawn_BV, -torch.inf)
    return torch.where(finite_B, _first_best(drawn_BV), 0), finite_B


def _first_best(x_BV: torch.Tensor) -> torch.Tensor:
    """Place of the maximum of each row, the first among equals (NaN: beyond the last)."""
    place_V = torch.arange(x_BV.shape[1], device=x_BV.device)
    is_best_BV = x_BV == x_BV.amax(1, keepdim=True)
    return torch.where(is_best_BV, place_V, x_BV.shape[1]).amin(1)


def scores(x_BV: torch.Tensor, temperature_B: torch.Tensor) -> torch.Tensor:
    """x / temperature, kept finite."""
    score_BV = x_BV / temperature_B.clamp(min=MIN_TEMPERATURE)[:, None]
    return score_BV.clamp(-MAX_SCORE, MAX_SCORE)


def keep(score_BV: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """What all filters keep, bool [B, V]."""
    sorted_BV, index_BV = torch.sort(score_BV, dim=1, descending=True)
    # Place of the first among equals: so many are strictly greater.
    place_V = torch.arange(score_BV.shape[1], device=score_BV.device)
    opens_BV = torch.ones_like(sorted_BV, dtype=torch.bool)
    opens_BV[:, 1:] = sorted_BV[:, 1:] != sorted_BV[:, :-1]
    above_BV = torch.where(opens_BV, place_V, 0).cummax(1).values

    top_k_B1 = params.top_k_B[:, None]
    in_k_BV = (top_k_B1 <= 0) | (above_BV < top_k_B1)
    weight_BV = weights(sorted_BV - sorted_BV[:, :1])
    mass_BV = torch.where(in_k_BV, weight_BV, 0)
    mass_above_BV = (mass_BV.cumsum(1) - mass_BV).gather(1, above_BV)
    top_p_B1, total_B1 = params.top_p_B[:, None], mass_BV.sum(1, keepdim=True)
    in_p_BV = (top_p_B1 >= 1) | (mass_above_BV.double() < top_p_B1.double() * total_B1.double())
    least_B1 = params.min_p_B[:, None].double() * 2.0**WEIGHT_BITS
    kept_BV = in_k_BV & in_p_BV & (weight_BV.double() >= least_B1)
    return torch.zeros_like(kept_BV).scatter_(1, index_BV, kept_BV)


def weights(x: torch.Tensor) -> torch.Tensor:
    """floor(exp(x) * 2^40) for FP32 x <= 0, int64; exp errs by about 1 unit of the last place."""
    x = x.clamp(min=MIN_EXPONENT)
    n = torch.floor(x * LOG2_E + 0.5)
    r = x - n * LN2_HIGH
    r = r - n * LN2_LOW
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = p * r * r + r
    p = p + 1.0
    whole = (p * 2.0**24).long()  # exact: p has 24 bits
    return (whole << (WEIGHT_BITS - 24)) >> (-n).long()


def gumbel(words: torch.Tensor) -> torch.Tensor:
    """-log(-log(u)) in FP32, u = 1 - (word + 1/2) / 2^32.

    Near u = 1 the inner logarithm starts from 1 - u, which is exact there: the tail of the noise,
    which decides among many tokens, is as fine as FP32 and not as coarse as u.
    """
    odd = 2 * words + 1
    near_one = words < 2**30
    power, rest = _split(((1 << 33) - odd).float() * 2.0**-33)
    rest = torch.where(near_one, odd.float() * -(2.0**-33), rest)
    exponential = -_log(torch.where(near_one, 0.0, power), rest)
    return -_log(*_split(exponential))


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e, f) with x = 2^e (1 + f) and 1 + f in sqrt(1/2)..sqrt(2), for normal x > 0."""
    bits = x.view(torch.int32)
    power = (bits >> 23) - 127
    fraction = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32)
    high = fraction > SQRT_2
    fraction = torch.where(high, fraction * 0.5, fraction)
    return (power + high.int()).float(), fraction - 1.0


def _log(power: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    """log(2^power (1 + f)), FP32."""
    z = f * f
    p = f * 7.0376836292e-2 - 1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f - 1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f - 1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f - 2.4999993993e-1
    p = p * f + 3.3333331174e-1
    p = p * f * z
    p = p + power * LN2_LOW
    p = p - z * 0.5
    return power * LN2_HIGH + (f + p)


def philox_words(
    seed_B: torch.Tensor, position_B: torch.Tensor, tokens_V: torch.Tensor
) -> torch.Tensor:
    """First word of Philox4x32-10, int64 [B, V] in 0..2^32-1: key seed, counter (token, position).

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
    """
    seed, position = seed_B[:, None], position_B[:, None]
    shape = torch.broadcast_shapes(seed.shape, tokens_V.shape)
    counter = (
        tokens_V.expand(shape),
        (position & _WORD).expand(shape),
        (position >> 32).expand(shape),
        torch.zeros(shape, dtype=torch.int64, device=seed.device),
    )
    return philox(counter, (seed & _WORD, seed >> 32))[0]


def philox(
    counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Ten rounds of Philox4x32; words are int64 in 0..2^32-1."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, PHILOX_FACTORS[0])
        high2, low2 = _multiply(c2, PHILOX_FACTORS[1])
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + PHILOX_KEYS[0]) & _WORD, (k1 + PHILOX_KEYS[1]) & _WORD
    return c0, c1, c2, c3


def _multiply(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(high, low) words of the product of two words; the parts stay below 2^63."""
    low, high = (a & 0xFFFF) * b, (a >> 16) * b
    high = high + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
