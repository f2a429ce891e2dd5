"""A kernel that is launched again and again: what Triton works out at each launch, found once.

Triton binds names, looks at every argument and makes a key of all constants to find the compiled
kernel, tens of microseconds of the host, and a prompt of a quantised model is bound by what the
host launches. Here what may change between launches is looked at, as Triton does on NVIDIA's cards:
where tensors lie, their dtypes, and of numbers that are specialised what Triton compiles for.
Switches of Triton that are set behind a kernel's first launch do not reach it, nor do hooks of
Triton's own profiler. Knows kernels by their parameters only: tensors first, then numbers, then
constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from triton.runtime import driver

from hotset.kernels.device import is_interpreted

# What Triton's compiler takes as known of a pointer, or not.
_ALIGNMENT = 16
# Whole numbers that a launcher made for 31 bits would cut off.
_TOO_WIDE = 2**31
# Of a launch: its description, and who is called before and behind it.
_NO_HOOKS = (None, None, None)


class Relaunch:
    """One kernel with its constants.

    Args:
        kernel: a `@triton.jit` function whose parameters are tensors, numbers and constants, in
            this order.
        constants: the kernel's, and how it is launched (`num_warps`, ...).
    """

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self._kernel, self._constants = kernel, constants
        self._interpreted = is_interpreted(kernel)
        self._known: dict[tuple[object, ...], Any] = {}
        if self._interpreted:
            return
        self._given = [param for param in kernel.params if not param.is_constexpr]
        last = kernel.params[len(self._given) :]
        assert all(param.is_constexpr for param in last)
        self._last = [constants[param.name] for param in last]
        # Places among the numbers of those that are specialised; `None` before the first launch.
        self._specialised: list[int] | None = None

    def __call__(
        self,
        grid: tuple[int, ...],
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[float] = (),
    ) -> None:
        """Launches it on the current stream.

        Args:
            grid: number of programs, of up to three axes.
            tensors, numbers: the kernel's, all of them; whole numbers take 31 bits.
        """
        if self._interpreted:
            self._kernel[grid](*tensors, *numbers, **self._constants)
            return
        if self._specialised is None:
            self._specialised = self._find_specialised(len(numbers))
        places = [tensor.data_ptr() % _ALIGNMENT == 0 for tensor in tensors]
        some = [numbers[place] for place in self._specialised]
        kinds = [(n == 1, n % _ALIGNMENT == 0, abs(n) < _TOO_WIDE) for n in some]
        key = (driver.active.get_current_device(), *places, *(t.dtype for t in tensors), *kinds)
        compiled = self._known.get(key)
        if compiled is not None:
            axes = (*grid, 1, 1)[:3]
            stream = driver.active.get_current_stream(key[0])
            # What Triton tells hooks about a launch (none are set but a profiler's) takes the host
            # as long as the launch.
            compiled.run(
                *axes,
                stream,
                compiled.function,
                compiled.packed_metadata,
                *_NO_HOOKS,
                *tensors,
                *numbers,
                *self._last,
            )
            return
        self._check(tensors, numbers)
        compiled = self._kernel[grid](*tensors, *numbers, **self._constants)
        if hasattr(compiled, "result"):  # who compiles beside the launches gets a promise
            compiled = compiled.result()
        if compiled is not None:  # it is where kernels are compiled only, for tests
            compiled._init_handles()  # done by that launch, unless Triton finds another way
            self._known[key] = compiled

    def _find_specialised(self, num_numbers: int) -> list[int]:
        params = self._given[len(self._given) - num_numbers :]
        return [place for place, param in enumerate(params) if not param.do_not_specialize]

    def _check(self, tensors: Sequence[torch.Tensor], numbers: Sequence[float]) -> None:
        assert len(tensors) + len(numbers) == len(self._given), self._kernel.fn.__name__
        for param, number in zip(self._given[len(tensors) :], numbers, strict=True):
            assert abs(number) < _TOO_WIDE, (param.name, number)


def row_stride(x: torch.Tensor, axis: int) -> int:
    """Elements from one row of an axis to the next; 0 where there is one row, which has none: what
    a tensor says then may be too wide for a kernel, as of the batch of one long prompt."""
    return x.stride(axis) if x.shape[axis] > 1 else 0
