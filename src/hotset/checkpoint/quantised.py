"""Which quantisation a checkpoint declares, from its JSON files alone.

Standard library only, so that an unsupported checkpoint is refused before anything heavy is
imported or built. Checkpoints that do not declare theirs are caught later, by the dtypes in the
headers (`validate`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hotset.checkpoint.files import read_json
from hotset.core.errors import CheckpointError


def refuse_quantised(folder: Path) -> None:
    """Refuses a quantised checkpoint, naming its method.

    Raises:
        CheckpointError: it is quantised, or a JSON file is damaged.
    """
    method = declared_method(folder)
    if method is not None:
        raise CheckpointError(
            f"`{folder}` is quantised with `{method}`, which is not supported yet",
            hint="use the BF16 checkpoint that it was made from",
        )


def declared_method(folder: Path) -> str | None:
    """The quantisation that `config.json` or `hf_quant_config.json` declares, `None` without one.

    E.g. `awq`, `fp8`, `compressed-tensors pack-quantized`, `modelopt NVFP4`.

    Raises:
        CheckpointError: a JSON file is damaged.
    """
    config = _read_json(folder / "config.json")
    # Composite checkpoints may declare it in the part that it applies to.
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    for part in parts:
        declared = part.get("quantization_config") or part.get("compression_config")
        if isinstance(declared, dict):
            return _named(declared, ("quant_method", "quant_algo", "format"))
    # Older ModelOpt exports leave config.json alone.
    exported = _read_json(folder / "hf_quant_config.json").get("quantization")
    if isinstance(exported, dict) and exported.get("quant_algo"):
        return _named({"quant_method": "modelopt", **exported}, ("quant_method", "quant_algo"))
    return None


def _named(declared: dict[str, Any], keys: tuple[str, ...]) -> str:
    words = [str(declared[key]) for key in keys if declared.get(key)]
    return " ".join(words) if words else "an unnamed method"


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
