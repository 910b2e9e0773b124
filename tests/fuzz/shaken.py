"""Measures the effect of rounding on a program: runs the program eagerly in float64, with noise on every value.

If rounding decides a comparison, a maximum or a difference, noise changes the result widely. Then a compiled model may
differ from eager as widely.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class _Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, size: float, generator: torch.Generator) -> Tensor:
        ctx.size, ctx.generator = size, generator
        return value * _factor(value, size, generator)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * _factor(gradient, ctx.size, ctx.generator), None, None


def _factor(like: Tensor, size: float, generator: torch.Generator) -> Tensor:
    noise = torch.rand(like.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return (1 + size * noise).to(like.device)


class Shaken(TorchFunctionMode):
    """Multiplies float64 values, and their gradients, by random factors within 1 +- `size`.

    Every result of a torch function gets factors. So does each of several arguments of one function: ``atan2(x, x)``
    adds two gradients that rounding keeps from cancelling. Values no larger than the rounding error of 1 become 0 half
    of the time, since rounding also decides whether a sum that cancels is 0 exactly.
    """

    def __init__(self, size: float, seed: int) -> None:
        super().__init__()
        self.size, self.generator = size, torch.Generator().manual_seed(seed)
        self.tiny = min(size, 2.0**-23)
        self.within = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        plain = self.within or name == "__get__" or (name.endswith("_") and not name.endswith("__")) or name in _PLAIN
        if plain:
            return func(*args, **(kwargs or {}))
        if name not in _VIEWS and sum(isinstance(given, Tensor) for given in args) > 1:
            args = self._shaken(args)
        return self._shaken(func(*args, **(kwargs or {})))

    def _shaken(self, values: Any) -> Any:
        self.within = True
        try:
            return tree_map(self._shake, values)
        finally:
            self.within = False

    def _shake(self, value: Any) -> Any:
        if type(value) is not Tensor or value.dtype is not torch.float64:
            return value
        shaken: Tensor = _Noise.apply(value, self.size, self.generator)
        lost = (torch.rand(value.shape, generator=self.generator) < 0.5).to(value.device)
        return torch.where(lost & (value.abs() <= self.tiny), torch.zeros_like(shaken), shaken)


_PLAIN = {"backward", "requires_grad_", "__set__", "__setitem__", "to", "clone", "arange"}
_VIEWS = {"__getitem__", "view_as", "expand_as", "reshape_as"}
