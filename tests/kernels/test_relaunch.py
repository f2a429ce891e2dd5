"""Launches that skip Triton's own look at the arguments: never for arguments of another kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

from hotset.kernels import relaunch
from hotset.kernels.relaunch import Relaunch, row_stride


def _stand_in(x, y, count, scale, SIZE: tl.constexpr, NAME: tl.constexpr):  # type: ignore[no-untyped-def]
    pass


class Compiled:
    """A compiled kernel that writes down how it is launched."""

    function, packed_metadata = 77, (1, 2)

    def __init__(self, log: list[Any]) -> None:
        self._log = log

    def _init_handles(self) -> None:
        """There is nothing to load."""

    def run(self, *args: Any) -> None:
        grid, launched, args = args[:3], args[3:9], args[9:]
        assert launched == ("stream of 0", 77, (1, 2), None, None, None)
        self._log.append(("again", grid, args))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was launched, by Triton itself (`first`) or past it (`again`)."""
    found: list[Any] = []

    def first(kernel: Any, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> Compiled:
            found.append(("first", grid, args, kwargs))
            return Compiled(found)

        return launch

    monkeypatch.setattr(JITFunction, "__getitem__", first)
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream="stream of {}".format)
    monkeypatch.setattr(relaunch, "driver", SimpleNamespace(active=active))
    return found


def made(*, specialised: bool = False) -> Relaunch:
    never = [] if specialised else ["count", "scale"]
    kernel = JITFunction(_stand_in, do_not_specialize=never)
    return Relaunch(kernel, {"NAME": "n", "SIZE": 8, "num_warps": 2})


def test_the_first_launch_is_triton_s_and_later_ones_of_the_kind_go_past_it(log: list[Any]) -> None:
    run, (x, y) = made(), torch.zeros(2, 64)
    run((3,), (x, y), (5, 0.5))
    run((4, 2), (y, x), (6, 1.5))
    assert log[0] == ("first", (3,), (x, y, 5, 0.5), {"NAME": "n", "SIZE": 8, "num_warps": 2})
    # Everything in the order of the parameters, constants too, and nothing that is not one.
    kind, grid, args = log[1]
    assert (kind, grid) == ("again", (4, 2, 1)) and args[0] is y and args[1] is x
    assert args[2:] == (6, 1.5, 8, "n")


@pytest.mark.parametrize(
    "other", [torch.zeros(64, dtype=torch.float16), torch.zeros(65)[1:]], ids=["dtype", "place"]
)
def test_another_dtype_or_alignment_is_triton_s_again(log: list[Any], other: torch.Tensor) -> None:
    run, x = made(), torch.zeros(64)
    for y in (x, other, x, other):
        run((1,), (x, y), (5, 0.5))
    assert [entry[0] for entry in log] == ["first", "first", "again", "again"]


def test_another_device_is_triton_s_again(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run, x = made(), torch.zeros(64)
    run((1,), (x, x), (5, 0.5))
    active = SimpleNamespace(get_current_device=lambda: 1)
    monkeypatch.setattr(relaunch, "driver", SimpleNamespace(active=active))
    run((1,), (x, x), (5, 0.5))
    assert [entry[0] for entry in log] == ["first", "first"]


def test_a_promise_of_a_kernel_is_waited_for(
    log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    promise = SimpleNamespace(result=lambda: Compiled(log))
    monkeypatch.setattr(JITFunction, "__getitem__", lambda *_: lambda *args, **kwargs: promise)
    run, x = made(), torch.zeros(64)
    for _ in range(2):
        run((1,), (x, x), (5, 0.5))
    assert [entry[0] for entry in log] == ["again"]


@pytest.mark.parametrize(("specialised", "kinds"), [(True, 4), (False, 1)])
def test_numbers_are_triton_s_again_where_it_compiles_for_them(
    log: list[Any], specialised: bool, kinds: int
) -> None:
    """For one, for multiples of 16 and for others, each a program of its own; 0 is a multiple."""
    run, x = made(specialised=specialised), torch.zeros(64)
    for number in (5, 6, 1, 16, 4096, 0, 1, 7):
        run((1,), (x, x), (number, 0.5))
    run((1,), (x, x), (5, 1.0))  # of another kind by the letter, which costs a look
    assert sum(entry[0] == "first" for entry in log) == kinds
    assert [entry[2][2] for entry in log] == [5, 6, 1, 16, 4096, 0, 1, 7, 5]


def test_arguments_that_do_not_fit_are_a_bug(log: list[Any]) -> None:
    x = torch.zeros(64)
    with pytest.raises(AssertionError, match="count"):
        made()((1,), (x, x), (2**31, 0.5))
    with pytest.raises(AssertionError, match="_stand_in"):
        made()((1,), (x,), (5, 0.5))
    assert not log


def test_a_number_that_is_too_wide_is_a_bug_behind_a_launch_of_its_kind_too(log: list[Any]) -> None:
    """What was made for 32 bits would cut it off in silence."""
    run, x = made(specialised=True), torch.zeros(64)
    run((1,), (x, x), (16, 0.5))
    with pytest.raises(AssertionError, match="count"):
        run((1,), (x, x), (2**31, 0.5))
    assert len(log) == 1


def test_an_axis_of_one_row_has_no_stride() -> None:
    """One prompt of 90,000 tokens of 128 heads of 192, and two rows of it."""
    x = torch.empty(2, 90_000, 128, 192, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    assert [row_stride(x[:1], axis) for axis in range(3)] == [0, 192, 128 * 192]
    assert row_stride(x, 0) == x.stride(0) > 2**31
