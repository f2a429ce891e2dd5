"""An environment with another line of transformers is told so, and not that hotset has a bug."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import transformers  # noqa: F401 - so that there is one
from repository import ROOT

from hotset.core.errors import ConfigError
from hotset.core.transformers_line import LINE, explain_other_line, is_other_line

# Where transformers lacks what came later; versions in, what each start says out, as JSON.
_OLD = """
import contextlib, io, json, sys
import transformers
from transformers import core_model_loading, modeling_utils
import hotset
from hotset.cli.main import main

def said(start):
    words = io.StringIO()
    with contextlib.redirect_stderr(words):
        try:
            start()
        except (SystemExit, Exception) as error:
            print(repr(error), file=words)
    return words.getvalue()

del core_model_loading.apply_renamings
answers = []
for transformers.__version__ in sys.argv[1:]:
    answers.append(said(lambda: main(["plan", "pocket"])))
    answers.append(said(lambda: hotset.load("pocket")))
print(json.dumps(answers))
"""


def test_an_old_one_is_named_with_what_to_do() -> None:
    """By the command line and in Python; the control is one of the right line."""
    done = subprocess.run(
        [sys.executable, "-c", _OLD, "5.19.0", f"{LINE}.9"], capture_output=True, check=True
    )
    command, python, command_of_bug, python_of_bug = json.loads(done.stdout)
    words = f"transformers is 5.19.0, hotset reads checkpoints with {LINE}"
    assert words in command and f"pip install 'transformers~={LINE}.0'" in command
    assert "SystemExit(2)" in command
    assert words in python and python.startswith("ConfigError")
    assert "this is a bug in hotset" in command_of_bug
    assert python_of_bug.startswith("ImportError")


def test_imports_of_others_fail_as_they_do() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_thing"), explain_other_line():
        import no_such_thing  # noqa: F401
    with pytest.raises(ImportError), explain_other_line():
        from transformers import NoSuchThing  # noqa: F401


def test_only_the_first_two_numbers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_other_line(f"{LINE}.1") and is_other_line("5.2.23") and is_other_line("6.23.0")
    # The one that an import finds now: the library may have put another in its own place.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.17.0")
    with pytest.raises(ConfigError, match=r"transformers is 5\.17\.0"), explain_other_line():
        from transformers import NoSuchThing  # noqa: F401


def test_the_line_is_the_one_that_is_pinned() -> None:
    assert f'"transformers>={LINE},<' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
