"""Why a field of a body is wrong, in our words: one sentence for each kind of error that the
validation library has for what bodies declare. Its own words never reach a client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_REASONS = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "extra_forbidden": "is not supported",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be {ge} or more",
    "int_from_float": "must be a whole number",
    "int_type": "must be a whole number",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be {le} or less",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "missing": "is missing",
    "model_attributes_type": "must be an object",
    "model_type": "must be an object",
    "none_required": "must be null",
    "string_pattern_mismatch": "must match `{pattern}`",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "string_type": "must be a text",
    "string_unicode": "must be a text",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least {min_length} entries",
    "union_tag_invalid": "must be of a type that is known: {expected_tags}",
    "union_tag_not_found": "must say its type",
}


def reason_of(error: Mapping[str, Any]) -> str:
    """What is wrong, to follow the field's name; a whole sentence where a check of ours says it.

    Args:
        error: `type`, and `ctx` with what the type needs.
    """
    context = dict(error.get("ctx", {}))
    for name, limit in context.items():
        context[name] = f"{limit:g}" if isinstance(limit, float) else limit
    if error["type"] == "value_error":
        return str(context["error"])
    return _REASONS.get(error["type"], "has a value that it cannot have").format(**context)
