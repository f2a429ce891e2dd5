"""The line of transformers that hotset reads checkpoints with, and how another one is refused.

Knows a version and words; imports nothing of transformers. Why one line: docs/decisions/0002.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hotset.core.errors import ConfigError

LINE = "5.23"  # as pyproject.toml has it; an environment of vLLM's has what vLLM asks for


def is_other_line(found: str) -> bool:
    """Whether a version is of another line: what follows the second number does not matter."""
    return found.split(".")[:2] != LINE.split(".")


def other_line(found: str, *, failed: str) -> ConfigError:
    """The refusal.

    Args:
        found: version.
        failed: what cannot be done.
    """
    return ConfigError(
        f"{failed}: transformers is {found}, hotset reads checkpoints with {LINE}",
        hint=f"`pip install 'transformers~={LINE}.0'`, with `--no-deps` beside vLLM",
    )


@contextmanager
def explain_other_line() -> Iterator[None]:
    """Says what it is when an import fails within the block for want of a part of transformers.

    Raises:
        ConfigError: the transformers of this environment is of another line.
    """
    try:
        yield
    except ImportError as error:
        package = (error.name or "").split(".")[0]
        found = getattr(sys.modules.get("transformers"), "__version__", LINE)
        if package != "transformers" or not is_other_line(found):
            raise
        raise other_line(found, failed=str(error)) from error
