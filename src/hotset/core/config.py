"""The one frozen configuration of an engine. Defaults live here and nowhere else.

`None` means "auto": the planner resolves it into a `MemoryPlan` that is printed; what a user
set is honoured or refused, never replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from difflib import get_close_matches

from hotset.core.errors import ConfigError

DEVICES = ("cuda", "cpu")
DTYPES = ("bfloat16", "float16", "float32")
KERNELS = ("triton", "reference")


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
        kernels: force `triton` or `reference`; auto: `triton` on CUDA.
        policy: who should own a slot, a name of `core.policy.POLICIES`; auto: `half-life`, or
            `none` where no slot can change hands (there are none, or one for every expert).
        half_life: engine steps after which a past use counts half; auto: the policy's default.
        graphs: capture the decode step into one CUDA graph; on a CPU there is none.
        compiled: fuse what surrounds experts and attention in a decode step of Triton kernels.
        poison: fill free slots with NaN (debugging; `verify` sets it).
        strict: a path that is not the planned one is an error instead of one warning.
        revision: Hub revision.
    """

    model: str
    device: str | None = None
    dtype: str | None = None
    vram_bytes: int | None = None
    ram_bytes: int | None = None
    context_tokens: int | None = None
    prefill_chunk: int | None = None
    kernels: str | None = None
    policy: str | None = None
    half_life: float | None = None
    graphs: bool = True
    compiled: bool = True
    poison: bool = False
    strict: bool = False
    revision: str | None = None

    def __post_init__(self) -> None:
        _check_choice("device", self.device, DEVICES)
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("kernels", self.kernels, KERNELS)
        for name, least in (
            ("vram_bytes", 0),
            ("ram_bytes", 1),
            ("context_tokens", 2),
            ("prefill_chunk", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"`{name}` is {value}, the least is {least}")

        if self.half_life is not None and not self.half_life > 0:
            raise ConfigError(f"`half_life` is {self.half_life}, it must be above 0")

    @classmethod
    def from_options(cls, model: str, **options: object) -> EngineConfig:
        """Builds a config from keyword options; an unknown one is refused with the nearest name."""
        known = {field.name for field in fields(cls)} - {"model"}
        for name in options:
            if name not in known:
                close = get_close_matches(name, known, n=1)
                hint = (
                    f"did you mean `{close[0]}`?" if close else f"known: {', '.join(sorted(known))}"
                )
                raise ConfigError(f"unknown option `{name}`", hint=hint)
        return cls(model=model, **options)  # type: ignore[arg-type]


def _check_choice(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise ConfigError(f"`{name}` is `{value}`", hint=f"one of {', '.join(choices)}")
