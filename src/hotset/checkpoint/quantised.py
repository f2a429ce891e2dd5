"""Which quantisation a checkpoint declares, from its JSON files alone.

Standard library only, so that a method that hotset does not read is refused before anything heavy
is imported or built. What the tensors themselves are is found out by their names, dtypes and
shapes (`formats`); the two are compared there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotset.checkpoint.files import read_json
from hotset.core.errors import CheckpointError

# `quant_method` of config.json.
METHODS = ("fp8", "mxfp8", "mxfp4", "compressed-tensors", "modelopt", "gptq", "awq")

_KEYS = ("quantization_config", "compression_config")
_NAMED_BY = ("quant_method", "quant_algo", "format")


@dataclass(frozen=True)
class Declared:
    """What `config.json` or `hf_quant_config.json` says.

    Attributes:
        path: the file that says it.
        method: one of `METHODS`.
        name: for messages, e.g. `awq`, `compressed-tensors pack-quantized`, `modelopt NVFP4`.
        values: all that it says.
        expert_dtype: of the config around it; DeepSeek-V4 says `fp4` there.
    """

    path: Path
    method: str
    name: str
    values: Mapping[str, Any] = field(repr=False)
    expert_dtype: str | None = None

    def number(self, *names: str) -> int | None:
        """The first of these values that is set to a number."""
        found = (self.values.get(name) for name in names)
        return next((value for value in found if isinstance(value, int)), None)

    def flag(self, name: str, *, default: bool) -> bool:
        """A value that is true or false; `default` where it is not given."""
        value = self.values.get(name)
        return value if isinstance(value, bool) else default

    @property
    def weight_groups(self) -> tuple[Mapping[str, Any], ...]:
        """The `weights` of each of compressed-tensors' `config_groups`."""
        groups = self.values.get("config_groups")
        found = groups.values() if isinstance(groups, dict) else ()
        weights = (group.get("weights") for group in found if isinstance(group, dict))
        return tuple(values for values in weights if isinstance(values, dict))


def declared_quantisation(folder: Path) -> Declared | None:
    """The quantisation that a folder declares, `None` without one.

    Raises:
        CheckpointError: it declares a method that hotset does not read, or a file is damaged.
    """
    found = next(_declarations(folder), None)
    if found is not None and found.method not in METHODS:
        raise CheckpointError(
            f"`{found.path}` says that the weights are quantised with `{found.name}`, which "
            "hotset does not read",
            hint=f"it reads {', '.join(METHODS)}; see the guide on formats",
        )
    if found is not None and _transforms(found.values):
        raise CheckpointError(
            f"`{found.path}` has a `transform_config`: weights are multiplied with rotated inputs, "
            "which hotset does not do",
            hint="use a checkpoint without rotations (QuIP, SpinQuant)",
        )
    return found


def _transforms(values: Mapping[str, Any]) -> bool:
    """Whether compressed-tensors is asked to rotate inputs while the model runs."""
    transform = values.get("transform_config")
    groups = transform.get("config_groups") if isinstance(transform, dict) else transform
    return bool(groups)


def _declarations(folder: Path) -> Iterator[Declared]:
    path = folder / "config.json"
    config = _read_json(path)
    # Composite checkpoints may declare it in the part that it applies to.
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        values = next((part[key] for key in _KEYS if isinstance(part.get(key), dict)), None)
        if values is not None:
            dtype = values.get("expert_dtype") or part.get("expert_dtype")
            yield Declared(path, *_named(values), values, dtype)
    # Older ModelOpt exports leave config.json alone.
    path = folder / "hf_quant_config.json"
    values = _read_json(path).get("quantization")
    if isinstance(values, dict) and values.get("quant_algo"):
        values = {"quant_method": "modelopt", **values}
        yield Declared(path, *_named(values), values)


def _named(values: Mapping[str, Any]) -> tuple[str, str]:
    """Its method, and that with what refines it."""
    words = [str(values[key]) for key in _NAMED_BY if values.get(key)]
    method = str(values.get("quant_method") or "").replace("_", "-")
    # vLLM's names for it are `modelopt_fp4`, `modelopt_mixed`.
    method = "modelopt" if method.startswith("modelopt") else method
    return method, " ".join(words) or "an unnamed method"


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
