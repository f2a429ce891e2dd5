"""Every environment variable that hotset reads, with its text.

At most ten; none changes a bit of the output.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from hotset.core.errors import ConfigError


@dataclass(frozen=True)
class EnvVar:
    """One declared variable: its name, what it does, and its allowed values (empty: free text)."""

    name: str
    text: str
    choices: tuple[str, ...] = ()

    def get(self) -> str | None:
        """The value, `None` when unset or empty.

        Raises:
            ConfigError: the value is not one of the choices.
        """
        value = os.environ.get(self.name) or None
        if value is not None and self.choices and value not in self.choices:
            raise ConfigError(
                f"`{self.name}` is `{value}`",
                hint=f"set it to one of {', '.join(self.choices)}, or unset it",
            )
        return value


LOG_LEVEL = EnvVar(
    "HOTSET_LOG", "how much is said on stderr", ("debug", "info", "warning", "error")
)
PROGRESS = EnvVar("HOTSET_PROGRESS", "progress bars while loading", ("on", "off"))
API_KEY = EnvVar(
    "HOTSET_API_KEY",
    "the key that `hotset serve` asks of every request, and `hotset chat` and `hotset heat` send",
)

ALL = (LOG_LEVEL, PROGRESS, API_KEY)
