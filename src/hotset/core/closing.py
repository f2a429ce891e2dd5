"""What holds something until it is closed: `with` closes it. Knows nothing of what is held."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """A context manager that ends with `close`."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what is held. Safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
