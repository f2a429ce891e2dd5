"""Progress bars while loading and recording; on stderr, and only for a person."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hotset.core import env

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn


@contextmanager
def loading_bar(what: str = "loading experts") -> Iterator[Callable[[int, int], None]]:
    """Yields a callback for (bytes done, bytes in all) that moves a bar.

    Shown on a terminal, or always with `HOTSET_PROGRESS=on`; never with `off`.
    """
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    units = (DownloadColumn(binary_units=True), TransferSpeedColumn())
    with _bar(what, BarColumn(), *units, TimeRemainingColumn()) as bar:
        task = bar.add_task("experts", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def token_bar(what: str, num_tokens: int) -> Iterator[Callable[[int], None]]:
    """Yields a callback for tokens that are done, which moves a bar under the same conditions."""
    from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

    with _bar(what, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("tokens", total=num_tokens)
        yield lambda done: bar.advance(task, done)


def _bar(what: str, *columns: ProgressColumn) -> Progress:
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    wanted = env.PROGRESS.get()
    shown = wanted == "on" or (wanted is None and sys.stderr.isatty())
    console = Console(stderr=True, force_terminal=shown or None)
    return Progress(TextColumn(what), *columns, console=console, disable=not shown)
