"""The progress bar while loading: bytes, rate, time left; on stderr, and only for a person."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hotset.core import env


@contextmanager
def loading_bar() -> Iterator[Callable[[int, int], None]]:
    """Yields a callback for (bytes done, bytes in all) that moves a bar.

    Shown on a terminal, or always with `HOTSET_PROGRESS=on`; never with `off`.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    wanted = env.PROGRESS.get()
    shown = wanted == "on" or (wanted is None and sys.stderr.isatty())
    bar = Progress(
        TextColumn("loading experts"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True, force_terminal=shown or None),
        disable=not shown,
    )
    with bar:
        task = bar.add_task("experts", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
