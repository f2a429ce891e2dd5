"""Published formats of quantised weights: one file for each, and the list of them.

To add one: a file with a `MatrixFormat`, and its class in `FORMATS`.
"""

from __future__ import annotations

from hotset.checkpoint.formats.awq import Awq
from hotset.checkpoint.formats.base import Group, MatrixFormat, located
from hotset.checkpoint.formats.fp8 import Fp8
from hotset.checkpoint.formats.gptq import Gptq
from hotset.checkpoint.formats.int4 import Int4
from hotset.checkpoint.formats.int8 import Int8
from hotset.checkpoint.formats.mxfp4 import Mxfp4
from hotset.checkpoint.formats.nvfp4 import Nvfp4
from hotset.checkpoint.quantised import Declared
from hotset.core.errors import CheckpointError
from hotset.core.formats import PLAIN, WeightFormat

# The more particular first: what a config means before tensors are seen is the first that agrees.
FORMATS: tuple[type[MatrixFormat], ...] = (Mxfp4, Nvfp4, Int8, Int4, Gptq, Awq, Fp8)

# All suffixes that tensors of quantised matrices have.
SUFFIXES = frozenset(
    suffix for format_ in FORMATS for naming in format_.namings for suffix in naming.suffixes
)


def recognise(group: Group, declared: Declared | None) -> MatrixFormat | None:
    """The format of all tensors of one matrix; `None` when none of them holds codes.

    Raises:
        CheckpointError: codes with other companions than any format has, with shapes that do not
            go together, or of a format that the config does not speak of.
    """
    for format_ in FORMATS:
        if any(naming.fits(group) for naming in format_.namings):
            found = format_.recognise(group, declared)
            if found is not None:
                _require_declared(found, group, declared)
                return found
    _refuse_half_matched(group)
    return None


def declared_weights(declared: Declared | None) -> WeightFormat:
    """How records would hold experts, by the config alone."""
    if declared is None:
        return PLAIN
    for format_ in FORMATS:
        if any(_agrees(pair, declared) for pair in format_.methods):
            weights = format_.declared_weights(declared)
            if weights is not None:
                return weights
    raise CheckpointError(
        f"`{declared.path}` says that the weights are quantised with `{declared.name}`, which "
        "hotset does not read",
        hint="see the guide on formats for what it reads",
    )


def _agrees(pair: tuple[str, str], declared: Declared) -> bool:
    method, word = pair
    return method == declared.method and word.lower() in declared.name.lower()


def _require_declared(found: MatrixFormat, group: Group, declared: Declared | None) -> None:
    """A config that speaks of another format belongs to other files, or is not understood."""
    if declared is None or any(_agrees(pair, declared) for pair in found.methods):
        return
    first = next(iter(group.values()))
    raise CheckpointError(
        f"{located(first)} is {found.label} by its names, dtypes and shapes, and "
        f"`{declared.path}` says `{declared.name}`",
        hint="fetch the `config.json` that belongs to these files",
    )


def _refuse_half_matched(group: Group) -> None:
    """Says of codes which companions are missing or unknown, by the format that is nearest."""
    begun = [naming for f in FORMATS for naming in f.namings if naming.begins(group)]
    if not begun:
        return
    nearest = min(begun, key=lambda naming: len(group.keys() ^ {naming.codes, *naming.required}))
    codes = group[nearest.codes]
    missing = [name for name in nearest.required if name not in group]
    extra = [name for name in group if name not in nearest.suffixes]
    said = [f"without `{name}`" for name in missing] + [f"with `{name}`" for name in extra]
    raise CheckpointError(
        f"{located(codes)} holds {codes.dtype} codes {' and '.join(said)}; expected beside it: "
        f"{', '.join(f'`{name}`' for name in nearest.required)}",
        hint="the checkpoint is incomplete, or in a format that hotset does not read",
    )
