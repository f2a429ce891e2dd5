"""What is logged while an answer streams comes behind its line, also where the answer fails."""

from __future__ import annotations

import logging
from contextlib import suppress

import pytest

from hotset.cli.generate import _warnings_behind


@pytest.mark.parametrize("fails", [False, True])
def test_a_warning_waits_for_the_end_of_the_line(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    order: list[str] = []

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            order.append(record.getMessage())

    monkeypatch.setattr(logging.getLogger("hotset"), "handlers", [Told()])
    log = logging.getLogger("hotset.runtime.degenerate")
    with suppress(ValueError), _warnings_behind():
        log.warning("one token for ever")
        order.append("text")
        if fails:
            raise ValueError
    log.warning("later")
    assert order == ["text", "one token for ever", "later"]
