"""Structured answers: which token may come next, by llguidance, from a JSON schema or a grammar.

Knows one checkpoint's tokenizer and token masks; nothing of requests, rows or devices. A schema
that the library cannot hold an answer to is refused with its reason, never taken in part. Free
answers need neither this nor the library: it is imported when the first compiler is made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from hotset.core.errors import ConfigError, RequestError
from hotset.runtime.schema_size import check_schema_size

if TYPE_CHECKING:
    import llguidance

# Any JSON object (https://platform.openai.com/docs/guides/structured-outputs#json-mode).
_ANY_OBJECT: dict[str, Any] = {"type": "object"}

# Between the parts of JSON: nothing, a space, or a line break and up to 32 columns. Free white
# space lets a weak model, whose favourite is forbidden, go on with it to the end of its tokens.
_JSON_OPTIONS: Any = {"whitespace_pattern": r" |\n {0,32}"}


class Matcher:
    """A `TokenMatcher` of one answer.

    Args:
        matcher: llguidance's, without error.
    """

    num_free = 0

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """See `TokenMatcher`."""
        return self._matcher.is_stopped()

    def fill_mask(self, words_W: NDArray[np.int32]) -> None:
        """See `TokenMatcher`.

        Raises:
            RequestError: the structure has become too large to follow.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        self._check()
        # Ids beyond the tokenizer's, which pad the vocabulary of some models, stay forbidden.
        words_W.fill(0)
        num_words = min(len(mask), len(words_W))
        words_W[:num_words] = mask[:num_words]

    def accept(self, token_id: int) -> None:
        """See `TokenMatcher`."""
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(
                f"the answer's structure cannot be followed: {_reason(self._matcher.get_error())}",
                hint="simplify the schema",
            )


class GrammarCompiler:
    """Makes matchers for one checkpoint. Takes about a second, so make it once.

    Args:
        tokenizer: the library's.
        stop_ids: ids that may end an answer.
        vocab: logits of the model.

    Raises:
        ConfigError: llguidance is not installed.
        RequestError: the tokenizer is of a kind that cannot be looked into.
    """

    def __init__(self, tokenizer: Any, *, stop_ids: frozenset[int], vocab: int) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise ConfigError(
                "structured answers need llguidance, which is not installed",
                hint='install it with `pip install "llguidance>=1.9,<2"`',
            ) from error
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise RequestError(
                f"structured answers need a `tokenizer.json`, this model's tokenizer is a "
                f"`{type(tokenizer).__name__}`"
            )
        size = max(vocab, len(tokenizer))
        ends = sorted(stop_ids) or tokenizer.eos_token_id
        added = tokenizer.added_tokens_decoder.items()
        self._special_ids = {token.content: number for number, token in added if token.special}
        longest_first = sorted(self._special_ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._matchers = llguidance.LLMatcher
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer.backend_tokenizer.to_str(), n_vocab=size, eos_token=ends
        )

    def json_object(self) -> Matcher:
        """Any JSON object."""
        return self.json_schema(_ANY_OBJECT)

    def json_schema(self, schema: Mapping[str, Any] | bool) -> Matcher:
        """JSON that follows a schema.

        Raises:
            RequestError: it is no schema, or has something that cannot be held to.
        """
        check_schema_size(schema, option="schema")
        try:
            grammar = self._matchers.grammar_from_json_schema(
                json.dumps(schema), overrides=_JSON_OPTIONS
            )
        except (TypeError, ValueError) as error:
            raise _refused("JSON schema", str(error), "schema") from error
        return self._compile(grammar, "JSON schema", option="schema")

    def regex(self, pattern: str) -> Matcher:
        """Text that a regular expression matches as a whole.

        Raises:
            RequestError: it is none, or has something that cannot be held to.
        """
        return self._compile(self._matchers.grammar_from_regex(pattern), "regular expression")

    def literal(self, text: str) -> str:
        """Lark source of a text. Special tokens, which no string of Lark matches, are named."""
        parts, end = [], 0
        for match in self._special.finditer(text):
            parts += [json.dumps(text[end : match.start()])] if match.start() > end else []
            parts.append(f"<[{self._special_ids[match[0]]}]>")
            end = match.end()
        parts += [json.dumps(text[end:])] if end < len(text) or not parts else []
        return " ".join(parts)

    def text_until(self, rule: str, mark: str) -> str:
        """Lark source of a rule: any text that ends with the first such mark, the mark with it."""
        special = self._special.search(mark)
        if special is None:
            return f"{rule}[suffix={json.dumps(mark)}]: /(?s:.*)/"
        # No text holds a special token. What the mark has before it is part of the text.
        return f"{rule}: /(?s:.*)/ {self.literal(mark[special.start() :])}"

    def json_rule(self, schema: Mapping[str, Any]) -> str:
        """Lark source of JSON that follows a schema.

        Raises:
            RequestError: it is too large.
        """
        check_schema_size(schema, option=None)
        return f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}"

    def lark(self, grammar: str, *, what: str = "grammar", option: str | None = None) -> Matcher:
        """Text of a context-free grammar in llguidance's form of Lark.

        Args:
            grammar: its source.
            what: it is called in errors.
            option: what the user set that it is made of.

        Raises:
            RequestError: it is none, or has something that cannot be held to.
        """
        return self._compile(self._matchers.grammar_from_lark(grammar), what, option=option)

    def _compile(self, grammar: str, what: str, *, option: str | None = None) -> Matcher:
        # A warning says that a keyword is not held to: that is an error here.
        _, messages = self._matchers.validate_grammar_with_warnings(grammar, self._tokenizer)
        if messages:
            raise _refused(what, messages[0], option)
        # log_level 0: nothing is written to stderr beside our own errors.
        matcher = self._matchers(self._tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds rules without an end now, and not in a step
        if matcher.is_error():
            raise _refused(what, matcher.get_error(), option)
        return Matcher(matcher)


def _refused(what: str, error: str, option: str | None) -> RequestError:
    return RequestError(f"the {what} cannot be followed: {_reason(error)}", option=option)


# Where a rule leads to itself before any text, the library names a type of its own.
_NO_END = {"NoExtensionBias": "it refers to itself without an end"}


def _reason(error: str) -> str:
    """The first line; of a regular expression, the parser's last, which says what is wrong."""
    lines = error.strip().splitlines() or ["no reason was given"]
    wrong = [line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")]
    return " ".join([_NO_END.get(lines[0], lines[0]), *wrong[-1:]])
