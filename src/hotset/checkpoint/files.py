"""Small files of a checkpoint, read so that whatever is wrong with one is said with its path.

Knows JSON and Git LFS pointers; nothing of what the files mean. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hotset.core.errors import CheckpointError

LFS_POINTER = b"version https://git-lfs.github.com/spec/"

AGAIN_HINT = "download or copy this file again"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: it cannot be read, is a Git LFS pointer, or holds no JSON object.
    """
    with readable(path):
        text = path.read_bytes()
    refuse_lfs_pointer(path, text)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"`{path}` is damaged: it is not JSON", hint=AGAIN_HINT) from error
    if not isinstance(data, dict):
        raise CheckpointError(f"`{path}` is damaged: it is not a JSON object", hint=AGAIN_HINT)
    return data


def refuse_lfs_pointer(path: Path, start: bytes) -> None:
    """Refuses a file that only says where Git LFS keeps its contents.

    Args:
        path: for the message.
        start: at least the first 40 bytes of the file.
    """
    if start.startswith(LFS_POINTER):
        raise CheckpointError(
            f"`{path}` is a Git LFS pointer, not the file itself",
            hint="run `git lfs pull` in that folder",
        )


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Says of an operating system's error within the block which path could not be read."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot read `{path}`: {error.strerror or error}",
            hint="check its owner and permissions",
        ) from error
