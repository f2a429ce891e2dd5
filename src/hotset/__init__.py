"""hotset runs Mixture-of-Experts language models larger than the GPU's memory.

Hot experts of each layer live in VRAM slots, the cold ones in pinned host memory, read over PCIe
when a token needs them. Start with `hotset.load`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotset.api import Model, Stats, Token, load

__version__ = "0.1.0"
__all__ = ["Model", "Stats", "Token", "__version__", "load"]


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import; `hotset --help` and `core` need neither.
    if name in {"Model", "Stats", "Token", "load"}:
        from hotset.core.transformers_line import explain_other_line

        with explain_other_line():
            from hotset import api
        return getattr(api, name)
    raise AttributeError(f"module `hotset` has no attribute `{name}`")
