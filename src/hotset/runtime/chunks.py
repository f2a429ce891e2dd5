"""How a prompt is cut into forwards. Knows ids and what a stock model can continue by."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain

from hotset.core.errors import RequestError
from hotset.core.geometry import ModelGeometry

logger = logging.getLogger(__name__)


def chunks_of(
    ids: list[int], size: int, *, geometry: ModelGeometry, strict: bool
) -> Iterator[list[int]]:
    """The tokens of each forward: chunks, or after the first chunk single tokens where the stock
    model can only continue by those.

    Args:
        ids: of a prompt, or what is left of one.
        size: most tokens of a chunk.
        geometry: of the model.
        strict: refuse single tokens.

    Raises:
        RequestError: they would be needed, and are refused.
    """
    if len(ids) <= size or geometry.continues_in_chunks:
        return (ids[start : start + size] for start in range(0, len(ids), size))
    reason = (
        f"`{geometry.model_type}` of transformers cannot continue a prompt in chunks: "
        f"{len(ids) - size} of {len(ids)} tokens run one by one"
    )
    if strict:
        raise RequestError(reason, hint="load with a larger `--prefill-chunk`")
    logger.warning("%s; a larger `--prefill-chunk` spares that", reason)
    return chain([ids[:size]], ([token] for token in ids[size:]))
