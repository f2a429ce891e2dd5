"""What tests of a scheduler share: run requests to their ends, and check that each has one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hotset.core.errors import HotsetError
from hotset.core.request import FinishReason
from hotset.runtime.requests import Event
from hotset.runtime.scheduler import Scheduler


@dataclass
class Answers:
    """Events by request, checked as they come: nothing behind an end.

    Attributes:
        tokens: of each request.
        ends: reason of each request that has ended.
        errors: of those that failed.
        early: events that came between the layers of a prompt.
    """

    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, FinishReason] = field(default_factory=dict)
    errors: dict[int, HotsetError] = field(default_factory=dict)
    early: list[Event] = field(default_factory=list)

    def take(self, event: Event) -> None:
        number = event.request_id
        assert number not in self.ends, f"an event behind the end of request {number}"
        if event.token_id is not None:
            self.tokens.setdefault(number, []).append(event.token_id)
        assert (event.error is not None) == (event.finish_reason is FinishReason.FAILED)
        if event.error is not None:
            self.errors[number] = event.error
        if event.finish_reason is not None:
            self.ends[number] = event.finish_reason

    def _take_early(self, event: Event) -> None:
        self.early.append(event)
        self.take(event)

    def step(self, scheduler: Scheduler) -> None:
        for event in scheduler.step(self._take_early):
            self.take(event)

    def run(
        self, scheduler: Scheduler, *, after: Callable[[int], None] | None = None, most: int = 5000
    ) -> Answers:
        """Steps until nothing is left, then checks that nothing is.

        Args:
            after: called with the number of each step.
            most: steps after which something hangs.
        """
        for number in range(most):
            self.step(scheduler)
            if after is not None:
                after(number)
            if not scheduler.wait(0):
                break
        counts = scheduler.counts()
        assert counts.num_running == counts.num_waiting == counts.num_blocks_used == 0
        assert sum(counts.num_finished.values()) == len(self.ends)
        return self
