"""What a user may set under `"hotset"` in vLLM's `--additional-config`. Data and its checks.

The values mean what they mean to `hotset serve`, except `vram`: vLLM owns the rest of the device,
so here it is what slots and staging buffers take, on each GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from hotset.core.config import EngineConfig
from hotset.core.errors import ConfigError

KEY = "hotset"
_ENGINE_OPTIONS = ("vram", "policy", "half_life", "profile", "staging", "kernels", "poison")
OPTIONS = (*_ENGINE_OPTIONS, "verify", "metrics_port")


@dataclass(frozen=True, kw_only=True)
class PluginConfig:
    """The user's choices.

    Attributes:
        vram_bytes: device memory of slots and staging buffers, on each GPU.
        policy, half_life, profile, staging, kernels, poison: see `EngineConfig`.
        verify: experts are checked before the first request, and the start ends if one is wrong.
        metrics_port: TCP port of rank 0's metrics on the loopback address, the next ones for the
            ranks behind it; `None` for none.
    """

    vram_bytes: int
    policy: str | None = None
    half_life: float | None = None
    profile: str | None = None
    staging: str | None = None
    kernels: str | None = None
    poison: bool = False
    verify: bool = False
    metrics_port: int | None = None

    @classmethod
    def of(cls, additional: object) -> PluginConfig | None:
        """The choices in `additional_config`, `None` where it says nothing of hotset.

        Raises:
            ConfigError: an unknown option, with the nearest name; a wrong value; no `vram`.
        """
        if not isinstance(additional, Mapping) or KEY not in additional:
            return None
        given = additional[KEY]
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"`{KEY}` in `--additional-config` is {given!r}, it must be an object",
                hint='write `--additional-config \'{"hotset": {"vram": "8GiB"}}\'`',
            )
        _check_names(given)
        if given.get("vram") is None:
            raise ConfigError(
                "`vram` is not set: how much device memory may experts take?",
                hint='write `--additional-config \'{"hotset": {"vram": "8GiB"}}\'`',
                option="vram",
            )
        return cls._of_options(given)

    @classmethod
    def _of_options(cls, given: Mapping[str, Any]) -> PluginConfig:
        options = {name: given[name] for name in _ENGINE_OPTIONS if name in given}
        checked = EngineConfig.from_options("a model of vLLM's", **options)
        assert checked.vram_bytes is not None
        return cls(
            vram_bytes=checked.vram_bytes,
            policy=checked.policy,
            half_life=checked.half_life,
            profile=checked.profile,
            staging=checked.staging,
            kernels=checked.kernels,
            poison=checked.poison,
            verify=_switch("verify", given.get("verify")),
            metrics_port=_port(given.get("metrics_port")),
        )


def _check_names(given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in OPTIONS:
            close = get_close_matches(str(name), OPTIONS, n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"known: {', '.join(OPTIONS)}"
            raise ConfigError(f"hotset has no option `{name}` inside vLLM", hint=hint)


def _switch(name: str, value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"`{name}` is {value!r}, it must be true or false", option=name)
    return bool(value)


def _port(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535:
        raise ConfigError(
            f"`metrics_port` is {value!r}, it must be a port from 1 to 65535", option="metrics_port"
        )
    return value
