"""The command line in this process, and tiny checkpoints for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from families import make_chatty
from hotset.cli.main import main


@dataclass(frozen=True)
class Done:
    """What a command left: its exit code, data and talk."""

    code: int
    out: str
    err: str

    @property
    def last_words(self) -> list[str]:
        """The final lines on stderr that are not empty: the cause, and what to do."""
        return [line for line in self.err.splitlines() if line][-2:]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs `hotset ARGS` as the shell would."""

    def run(*args: str | Path) -> Done:
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(arg) for arg in args])
        captured = capfd.readouterr()
        return Done(int(end.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of bytes with a chat template, 4 layers of 8 experts."""
    return make_chatty(tmp_path_factory.mktemp("chatty"))
