"""`hotset chat` in a terminal of its own (a pty), against a server whose model is scripted."""

from __future__ import annotations

import codecs
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from clients import Scripted, serving

from hotset.core.request import FinishReason
from hotset.runtime.text import Text
from hotset.server.config import ServerConfig

WAIT_SECONDS = 60
CTRL_C, CTRL_D, CTRL_J, UP = "\x03", "\x04", "\n", "\x1b[A"
ALT_ENTER, ENTER = "\x1b\r", "\r"
# Colours, movements of the cursor, and what asks the terminal for its abilities.
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|[78=>])")
COMMAND = [sys.executable, "-m", "hotset.cli.entry", "chat"]


class Terminal:
    """A program in a pty: keys in, text out without escapes."""

    def __init__(self, *args: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            # As a login shell does it: Ctrl-C reaches the program as a signal.
            preexec_fn=_take_terminal,  # noqa: PLW1509 - two system calls, no lock
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
        )
        os.close(theirs)
        self._seen = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def type(self, text: str) -> None:
        """At the next prompt: before it the terminal would make a new line of Enter."""
        self.wait_for(">")
        self.press(text)

    def leave(self) -> int:
        """Ctrl-D until the program has ended, and its exit status.

        An edit that is dropped draws its prompt once more, and a key between that one and the
        next prompt is the terminal's: of a Ctrl-D there nothing is left.
        """
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            with suppress(OSError):  # it has just closed its end
                self.press(CTRL_D)
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(timeout=1)
        raise AssertionError(f"still there: {self._seen!r}")

    def wait_for(self, text: str) -> str:
        """What came up to and with `text`; later calls begin behind it."""
        self._wait(lambda seen: text in seen, repr(text))
        before, _, self._seen = self._seen.partition(text)
        return before + text

    def wait_for_words(self, number: int, *, behind: str) -> None:
        """Until there are so many behind the last `behind`; later calls see them all again."""
        self._wait(
            lambda seen: behind in seen and len(seen.rpartition(behind)[2].split()) >= number,
            f"{number} words behind {behind!r}",
        )

    def _wait(self, come: Callable[[str], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not come(self._seen):
            left = deadline - time.monotonic()
            assert left > 0 and self._read(left), f"no {what} in {self._seen!r}"

    def _read(self, seconds: float) -> bool:
        if not select.select([self._ours], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # what Linux says at the end of a pty
            return False
        self._seen = ESCAPES.sub("", self._seen + self._decoder.decode(data))
        return bool(data)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # A shell's background job ignores Ctrl-C, and so would its children.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def terminal(*args: str) -> Iterator[Terminal]:
    opened = Terminal(*args)
    try:
        yield opened
    finally:
        opened.close()


def asked(server: Scripted) -> str:
    """The prompt of the latest request."""
    return server.served.text.decode(server.scheduler.last.prompt_ids)


def test_a_conversation(server: Scripted, tmp_path: Path) -> None:
    """Messages of several lines, their history, commands, and a file that keeps the history."""
    history = tmp_path / "history"
    server.say("Good day.")
    with terminal(f"{server.url}/v1", "--history", str(history), "--system", "be kind") as screen:
        screen.wait_for("Ctrl+D leaves")
        screen.type(f"one{ALT_ENTER}two{CTRL_J}three{ENTER}")
        screen.wait_for("Good day.")
        screen.wait_for("9 tokens")
        assert asked(server) == "system\nbe kind\nuser\none\ntwo\nthree\nassistant\n"

        screen.type(f"{UP}!{ENTER}")
        screen.wait_for("9 tokens")
        assert "three\nassistant\nGood day.\nuser\none\ntwo\nthree!" in asked(server)

        screen.type(f"/new{ENTER}")
        screen.wait_for("a new conversation")
        screen.type(f"/usr/bin is a folder{ENTER}")
        screen.wait_for("9 tokens")
        assert "three" not in asked(server) and "/usr/bin is" in asked(server)

        screen.type(f"/nothing{ENTER}")
        screen.wait_for("there is no `/nothing`")
        screen.type(f"half a thought{CTRL_C}")
        screen.wait_for(">")
        assert screen.leave() == 0
    assert "+one\n+two\n+three" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0, "others may not read it"


def test_ctrl_c_stops_the_answer_and_not_the_program(server: Scripted) -> None:
    server.say("la " * 1000)
    server.scheduler.pause_seconds = 0.02
    try:
        with terminal(server.url) as screen:
            screen.wait_for("Ctrl+D leaves")
            screen.type(f"sing{ENTER}")
            screen.wait_for("la la")
            screen.press(CTRL_C)
            screen.wait_for("[stopped")
            server.ended()
            number = server.scheduler.num_submitted
            assert server.scheduler.reasons_of[number] is FinishReason.CANCELLED
            server.say("Hello again.")
            screen.type(f"and now?{ENTER}")
            screen.wait_for("Hello again.")
            screen.type(f"/quit{ENTER}")
            assert screen.process.wait(WAIT_SECONDS) == 0
    finally:
        server.scheduler.pause_seconds = 0.0


def piped(*args: str, text: str = "hi\n", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | env,
    )


def test_a_pipe_has_one_message_a_line(server: Scripted) -> None:
    server.say("Grüße")
    sampling = ("--top-k", "5", "--logit-bias", "7=-2", "--presence-penalty", "1")
    done = piped(server.url, "--json", "--max-tokens", "3", *sampling, text="one\n\ntwo\n")
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["text"] for answer in answers] == ["Grü"[:2] + "�"] * 2
    assert [answer["finish_reason"] for answer in answers] == ["length"] * 2
    assert answers[0]["num_tokens"] == 3 and answers[0]["first_token_seconds"] > 0
    sent = server.scheduler.last.sampling
    assert (sent.top_k, sent.logit_bias, sent.presence_penalty) == (5, {7: -2.0}, 1.0)


def test_a_refused_question_is_forgotten_and_the_next_one_answered(server: Scripted) -> None:
    done = piped(server.url, text=f"{'x' * 5000}\nshort\n")
    assert done.returncode == 0
    assert "error:" in done.stderr and "4096" in done.stderr
    assert done.stdout.strip() == "Hello"
    assert "xxx" not in asked(server)


def test_keys_of_a_server(byte_text: Text) -> None:
    with serving(byte_text, ServerConfig(port=0, api_keys=("k1",))) as server:
        assert piped(server.url, HOTSET_API_KEY="k1").stdout.strip() == "Hello"
        refused = piped(server.url, "--api-key", "wrong")
    assert refused.returncode == 2
    assert "hint: give its key with `--api-key`" in refused.stderr


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["http://127.0.0.1:9"], 1, "does not answer: [Errno 111] Connection refused"),
        (["localhost:8000"], 2, "a server is `http://localhost:8000`"),
        (
            ["http://127.0.0.1:9", "--vram", "8GiB"],
            2,
            "`--vram` is for a model that is loaded here",
        ),
        (["pocket", "--api-key", "k"], 2, "`--api-key` is for a URL"),
        (["pocket", "--temperature", "-1"], 2, "`--temperature` is -1"),
        (["pocket", "--top-k", "-1"], 2, "`--top-k` is -1"),
        (["pocket", "--history", "x"], 2, "`--history` is for a terminal"),
    ],
)
def test_what_cannot_be(args: list[str], code: int, says: str) -> None:
    done = piped(*args)
    assert done.returncode == code
    assert says in done.stderr


def test_a_model_that_is_loaded_here_stops_within_a_token() -> None:
    """Ctrl-C ends the answer of a model in this process too, and the next one is not disturbed."""
    # So hot that it hardly ever ends by itself; the seed makes two answers to one question alike.
    flags = ["--device", "cpu", "--context", "512", "--temperature", "2", "--seed", "1"]
    with terminal("pocket", *flags) as screen:
        screen.wait_for("Ctrl+D leaves")
        answers = []
        for _ in range(2):
            screen.type(f"Go on{ENTER}")
            screen.wait_for_words(4, behind="Go on")
            screen.process.send_signal(signal.SIGINT)
            answers.append(screen.wait_for("[stopped").rpartition("Go on")[2].split())
            screen.type(f"/new{ENTER}")
            screen.wait_for("a new conversation")
        shorter = min(map(len, answers)) - 2  # without the last word, and "[stopped"
        assert shorter >= 1
        assert answers[0][:shorter] == answers[1][:shorter]
        screen.wait_for(">")
        assert screen.leave() == 0
