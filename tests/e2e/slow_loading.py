"""Run by `test_interrupt.py` in a process of its own: `hotset ARGS` with files that read slowly.

    python slow_loading.py generate FOLDER PROMPT

Says `loading` on stdout once experts are being read.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

from hotset.checkpoint import loader
from hotset.checkpoint.reader import Range, ShardReader
from hotset.cli.main import main


class SlowReader(ShardReader):
    """A disk that takes a tenth of a second for each piece."""

    told = False

    def read_all(self, ranges: Iterable[Range]) -> None:
        if not SlowReader.told:
            SlowReader.told = True
            print("loading", flush=True)
        time.sleep(0.1)
        super().read_all(ranges)


if __name__ == "__main__":
    loader._BATCH_BYTES = 1
    loader.ShardReader = SlowReader  # type: ignore[misc]
    main(sys.argv[1:])
