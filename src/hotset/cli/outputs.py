"""What commands write: files looked at before any work is done and replaced only when it is, tables
that are not cut.

Knows paths and flags; what goes into a file is its writer's business.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hotset.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

# Below this rich leaves out columns of a table, or all of it; a terminal only breaks its lines.
_LEAST_COLUMNS = 60


def check_writable(file: Path | None, *, flag: str) -> None:
    """Refuses a file that cannot be written, before anything is loaded or measured; `None` passes.

    What the file has is left as it is; pipes and devices are not opened, as that is an event to who
    reads them.

    Raises:
        ConfigError: names the flag.
    """
    if file is None or (file.exists() and not (file.is_file() or file.is_dir())):
        return
    is_new = not file.exists()
    try:
        file.open("a").close()
        if is_new:
            file.unlink()
    except OSError as error:
        raise ConfigError(f"`{flag} {file}` cannot be written: {error.strerror}") from error


def check_apart(
    written: Mapping[str, Path | None], read: Iterable[tuple[str, Path | None]] = ()
) -> None:
    """Refuses a file to write that another flag names as well: one of the two would be lost.

    Args:
        written: files by their flags; `None` where not given.
        read: flags and their files.

    Raises:
        ConfigError: names both flags.
    """
    seen = {path.resolve(): flag for flag, path in read if path is not None}
    for flag, path in written.items():
        if path is None:
            continue
        other = seen.setdefault(path.resolve(), flag)
        if other != flag:
            raise ConfigError(
                f"`{other}` and `{flag}` are the same file, `{path}`",
                hint=f"give `{flag}` a name of its own",
            )


@contextmanager
def whole_file(path: Path | None) -> Iterator[Path]:
    """Gives a file to write to, which is copied to `path` when the block ends well.

    What an interrupted command would have replaced is left as it was. Without a `path` the file is
    forgotten.

    Raises:
        ConfigError: the copy cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="hotset-") as folder:
        file = Path(folder) / "whole"
        yield file
        if path is None:
            return
        try:
            shutil.copyfile(file, path)
        except OSError as error:
            raise ConfigError(f"`{path}` cannot be written: {error.strerror}") from error


def table_console() -> Console:
    """For tables on stdout, however narrow the terminal says it is."""
    from rich.console import Console

    console = Console()
    return console if console.width >= _LEAST_COLUMNS else Console(width=_LEAST_COLUMNS)
