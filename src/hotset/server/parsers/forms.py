"""How a family writes reasoning, content and calls: what a forced answer has to follow.

Plain data, beside the syntax that reads the same; `server.call_grammar` makes a grammar of it.
"""

from __future__ import annotations

from dataclasses import dataclass

# Places within the texts of a form.
NAME = "\0name"  # of the tool
KEY = "\0key"  # of a parameter
NUMBER = "\0number"  # any number
LINE = "\0line"  # a line break, or none


@dataclass(frozen=True)
class ParameterForm:
    """Arguments that are written one by one.

    Attributes:
        json: before and behind a value in JSON.
        text: before and behind a text that stands there as it is, up to the first of what is
            behind it; `None` where texts are JSON too.
        after: behind each, as layout.
        between: two of them.
    """

    json: tuple[str, str]
    text: tuple[str, str] | None = None
    after: str = ""
    between: str = ""


@dataclass(frozen=True)
class CallForm:
    """Calls.

    Attributes:
        call: before and behind the arguments of one.
        around: before the first and behind the last.
        between: two of them; `None` where an answer has one at most.
        parameters: `None` where the arguments are one JSON object.
    """

    call: tuple[str, str]
    around: tuple[str, str] = ("", "")
    between: str | None = ""
    parameters: ParameterForm | None = None


@dataclass(frozen=True)
class AnswerForm:
    """A whole answer.

    Attributes:
        calls: its calls.
        thought: before and behind reasoning that may come first; `None` where there is none.
        in_thought: the prompt has opened the reasoning.
        content: before the content.
    """

    calls: CallForm
    thought: tuple[str, str] | None = None
    in_thought: bool = False
    content: str = ""
