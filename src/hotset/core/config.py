"""The one frozen configuration of an engine. Defaults live here and nowhere else.

`None` means "auto": the planner resolves it into a `MemoryPlan` that is printed; what a user
set is honoured or refused, never replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from difflib import get_close_matches
from types import NoneType
from typing import Any, get_args, get_type_hints

from hotset.core.errors import ConfigError
from hotset.core.policy import MIN_HALF_LIFE, POLICIES
from hotset.core.units import MAX_BYTES, parse_bytes
from hotset.core.workload import parse_workload

DEVICES = ("cuda", "cpu")
DTYPES = ("bfloat16", "float16", "float32")
KERNELS = ("triton", "reference")
STAGING = ("in-place", "ring")
KV_DTYPES = ("fp8",)

# More than any model's context, and every product with bytes per token fits 64 bits.
MAX_TOKENS = 2**31 - 1

# Beyond it a step could not fill slots any more, and would bring every expert anyway.
MAX_BATCH = 64

# What users call a field whose name here carries its unit.
OPTION_NAMES = {"vram_bytes": "vram", "ram_bytes": "ram", "context_tokens": "context"}
_SIZES = ("vram_bytes", "ram_bytes")
_SHORT = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "gpu": "cuda",
}
_TYPE_WORDS: dict[type, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    NoneType: "None",
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What a user may choose about an engine.

    Attributes:
        model: a Hub id, a local folder, or `pocket`.
        device: `cuda` or `cpu`; auto: `cuda` where there is one.
        dtype: compute dtype; auto: the checkpoint's own.
        vram_bytes: device memory that everything together may take; auto on CUDA: what is free
            less headroom; auto on a CPU: no slots.
        ram_bytes: host memory that may be taken; auto: what is available.
        context_tokens: longest prompt + answer; auto: the model's, capped by what fits.
        prefill_chunk: most prompt tokens in one forward; auto: by the planner.
        max_batch: most requests that are answered at the same time; where a model cannot run over
            the KV pool they are answered one by one all the same.
        kv_tokens: tokens of KV cache for all of them together; auto: the longest context for one,
            and for each further one a part of it.
        kv_dtype: `fp8` keeps keys and values in eight bits, a power of two for each token and head
            beside them: half the memory, and other low digits; auto: as the model computes.
        lossless: keep BF16 experts in about 12 bits a weight, every bit of them, so that slots and
            host memory hold a third more and each crosses the link in three quarters of the time.
        batch_invariant: no bit of an answer depends on what is answered beside it. Each row then
            runs its own steps, and an expert that several rows miss crosses the link for each.
        prefix_reuse: keep keys and values of prompts and answers while there is room, for requests
            that begin alike. Low bits may depend on what was reused, unless `batch_invariant`.
        prefill_share: share of their rate that running answers give up while a long prompt is
            taken in, above 0 to 1.
        kernels: force `triton` or `reference`; auto: `triton` on CUDA.
        policy: who should own a slot, a name of `core.policy.POLICIES`; auto: `half-life`, or
            `none` where no slot can change hands (there are none, or one for every expert).
        staging: how long prompts read experts without a slot: `ring` copies them through staging
            buffers, `in-place` lets kernels read them; auto: whichever costs less, and on a CPU
            in place. It changes no bit.
        workload: requests that the plan is made fast for, `PROMPT+ANSWER` in tokens with commas
            between; auto: prompts of a half, a quarter and an eighth of a context that was asked
            for, at least of 4,096 tokens, with answers of 512. It changes no bit.
        half_life: engine steps after which a past use counts half; auto: the policy's default.
        profile: file of `hotset profile` that says which experts are used; static policies and
            `forecast` need one.
        graphs: capture the decode step into one CUDA graph; on a CPU there is none.
        compiled: fuse what surrounds experts and attention in a decode step of Triton kernels, and
            norms in prompts.
        poison: fill free slots with NaN (debugging; `verify` sets it).
        strict: a path that is not the planned one is an error instead of one warning.
        revision: Hub revision.

    Raises:
        ConfigError: a value of the wrong type, out of range, or an unknown choice.
    """

    model: str
    device: str | None = None
    dtype: str | None = None
    vram_bytes: int | None = None
    ram_bytes: int | None = None
    context_tokens: int | None = None
    prefill_chunk: int | None = None
    max_batch: int = 1
    kv_tokens: int | None = None
    kv_dtype: str | None = None
    lossless: bool = False
    batch_invariant: bool = False
    prefix_reuse: bool = False
    prefill_share: float = 0.5
    kernels: str | None = None
    policy: str | None = None
    half_life: float | None = None
    profile: str | None = None
    staging: str | None = None
    workload: str | None = None
    graphs: bool = True
    compiled: bool = True
    poison: bool = False
    strict: bool = False
    revision: str | None = None

    def __post_init__(self) -> None:
        self._check_types()
        check_choice("device", self.device, DEVICES)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("kernels", self.kernels, KERNELS)
        check_choice("staging", self.staging, STAGING)
        check_choice("kv_dtype", self.kv_dtype, KV_DTYPES)
        if self.workload is not None:
            parse_workload(self.workload)
        check_choice("policy", self.policy, tuple(POLICIES))
        _check_range("vram", self.vram_bytes, 0, MAX_BYTES)
        _check_range("ram", self.ram_bytes, 1, MAX_BYTES)
        _check_range("context", self.context_tokens, 2, MAX_TOKENS)
        _check_range("prefill_chunk", self.prefill_chunk, 1, MAX_TOKENS)
        _check_range("max_batch", self.max_batch, 1, MAX_BATCH)
        _check_range("kv_tokens", self.kv_tokens, self.context_tokens or 2, MAX_TOKENS)
        if not 0.0 < self.prefill_share <= 1.0:
            raise ConfigError(
                f"`prefill_share` is {self.prefill_share}, it must be above 0 and at most 1",
                option="prefill_share",
            )
        if self.half_life is not None and not self.half_life >= MIN_HALF_LIFE:  # NaN is not
            raise ConfigError(
                f"`half_life` is {self.half_life}, the least is {MIN_HALF_LIFE} steps",
                option="half_life",
            )

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Rows of each decode step that an engine keeps: 1, 2, 4, ... up to the first that serves
        `max_batch` rows at once; or, with `batch_invariant`, `max_batch` times 1."""
        if self.batch_invariant:
            return (1,) * self.max_batch
        return tuple(2**power for power in range((self.max_batch - 1).bit_length() + 1))

    @property
    def num_sampler_rows(self) -> int:
        """Rows that a sampler needs: of every request, and of the largest step."""
        return max(self.max_batch, *self.batch_sizes)

    def _check_types(self) -> None:
        for name, declared in get_type_hints(type(self)).items():
            value = getattr(self, name)
            wanted = get_args(declared) or (declared,)
            # A whole number is a number, and to Python `True` is 1, which nobody means here.
            allowed = (*wanted, int) if float in wanted else wanted
            if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in wanted):
                option = OPTION_NAMES.get(name, name)
                words = " or ".join(_TYPE_WORDS[kind] for kind in wanted)
                raise ConfigError(f"`{option}` is {value!r}, it must be {words}", option=option)

    @classmethod
    def from_options(cls, model: str, **options: Any) -> EngineConfig:
        """Builds a config from options as users call them: `vram` and `ram` in bytes or as text
        (`8GiB`), `context`, and every other field by its name.

        Raises:
            ConfigError: an unknown option, with the nearest name; a wrong value.
        """
        known = dict(cls._options())
        given: dict[str, Any] = {}
        for option, value in options.items():
            if option not in known:
                close = get_close_matches(option, known, n=1)
                hint = (
                    f"did you mean `{close[0]}`?" if close else f"known: {', '.join(sorted(known))}"
                )
                raise ConfigError(f"unknown option `{option}`", hint=hint)
            is_size = known[option] in _SIZES and value is not None
            given[known[option]] = parse_bytes(value, name=option) if is_size else value
        return cls(model=model, **given)

    @classmethod
    def _options(cls) -> Iterator[tuple[str, str]]:
        """Every option's name and its field's."""
        for field in fields(cls):
            if field.name != "model":
                yield OPTION_NAMES.get(field.name, field.name), field.name


def check_choice(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    """Refuses a word that is none of the choices; `None` passes.

    Raises:
        ConfigError: with the choice that was probably meant, or all of them.
    """
    if value is not None and value not in choices:
        meant = _SHORT.get(value.lower()) or next(iter(get_close_matches(value, choices, n=1)), "")
        hint = f"did you mean `{meant}`?" if meant in choices else f"one of {', '.join(choices)}"
        raise ConfigError(f"`{name}` is `{value}`", hint=hint, option=name)


def _check_range(name: str, value: int | None, least: int, most: int) -> None:
    if value is None or least <= value <= most:
        return
    limit = f"the least is {least}" if value < least else f"the most is {most}"
    raise ConfigError(f"`{name}` is {value}, {limit}", option=name)
