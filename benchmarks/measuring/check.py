"""Compares outputs and gradients with those of eager PyTorch in float64, before a time is reported."""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases.nested import map_tensors
from benchmarks.measuring.step import Step

# The error of a row may be this many times eager's error in the same dtype ...
EAGER_FACTOR = 8.0
# ... or this relative error, about 80 roundings of float32 ...
FLOOR = 1e-5
# ... or this many roundings of a coarser dtype, because outputs and intermediate results are stored in that dtype.
FLOOR_ROUNDINGS = 4.0
# A gradient jumps if rounding flips a sign before a ReLU or changes the winner of a maximum. With millions of
# activations a flip or two is likely in every float32 run, also eager's (see `worst_error` of GIN in
# benchmarks/results/nvidia-h200/guide-guide-cuda.json). The unit tests compare gradients to rounding, on graphs too
# small for a flip.
KINK_FLOOR = 1e-2
# ... and in a small graph this many flips, among as many hidden values as the output has, change more than that. One
# flip among n values changes the norm of a gradient by about sqrt(2 / n).
FLIPS = 8
# The largest error that flips excuse.
MOST_KINKS = 3e-2

Results = dict[str, Tensor | None]


@dataclass(frozen=True)
class Verdict:
    """The tensor whose error is largest relative to its tolerance."""

    ok: bool
    name: str
    error: float
    tolerance: float
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"{self.name}: {self.reason}"
        return f"{self.name}: relative error {self.error:.1e}, tolerance {self.tolerance:.1e}"


class Reference:
    """The right results of a model, in float64, and the error of eager in the dtype of `weights`.

    Args:
        model: the model in its usual dtype; it is copied.
        inputs: its arguments.
        weights: the weights of the sum over the output that is differentiated.
    """

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...], weights: Tensor) -> None:
        double = copy.deepcopy(model).double()
        step = Step(double, double, tuple(map_tensors(to_double, value) for value in inputs), weights.double())
        step()
        self.weights = weights
        self.exact = step.results()
        eps = torch.finfo(weights.dtype).eps
        norms = [tensor.norm().item() for tensor in self.exact.values() if tensor is not None]
        # A gradient that cancels to almost zero is compared with the size of the others.
        self.smallest_norm = max(norms) * eps
        eager = copy.deepcopy(model)
        step = Step(eager, eager, inputs, weights)
        step()
        results = step.results()
        step.clear()
        self.tolerances = {
            name: max(self._floor(name, eps, weights.numel()), EAGER_FACTOR * self.error(name, results[name]))
            for name in self.exact
        }

    @staticmethod
    def _floor(name: str, eps: float, hidden: int) -> float:
        kinks = max(KINK_FLOOR, math.sqrt(2 * FLIPS / max(hidden, 1)))
        return max(FLOOR if name == "output" else min(kinks, MOST_KINKS), FLOOR_ROUNDINGS * eps)

    def error(self, name: str, found: Tensor | None) -> float:
        """Returns `||found - exact|| / ||exact||`; infinite if a tensor is missing or the shapes differ."""
        exact = self.exact[name]
        if exact is None or found is None:
            return 0.0 if exact is found else float("inf")
        if found.shape != exact.shape:
            return float("inf")
        return float((found.double() - exact).norm() / max(exact.norm().item(), self.smallest_norm, 1e-300))

    def check(self, results: Results) -> Verdict:
        """Compares the results of one step; the verdict names the worst tensor."""
        if set(results) != set(self.exact):
            names = ", ".join(sorted(set(results) ^ set(self.exact)))
            return Verdict(False, "names", float("inf"), 0.0, f"found or expected only: {names}")
        worst: Verdict | None = None
        for name, tolerance in self.tolerances.items():
            error = self.error(name, results[name])
            # The comparison is written so that a NaN counts as wrong, and as the worst.
            verdict = Verdict(error <= tolerance, name, error, tolerance, self._reason(name, results[name]))
            if worst is None or not error / tolerance <= worst.error / worst.tolerance:
                worst = verdict
                if error != error:
                    break
        assert worst is not None
        return worst

    def _reason(self, name: str, found: Tensor | None) -> str:
        exact = self.exact[name]
        if (found is None) != (exact is None):
            return "missing" if found is None else "found, but eager has none"
        if found is not None and exact is not None and found.shape != exact.shape:
            return f"shape {tuple(found.shape)}, expected {tuple(exact.shape)}"
        return ""


def to_double(tensor: Tensor) -> Tensor:
    """Returns a floating-point tensor in float64, with a gradient if the tensor needs one; others as they are."""
    if tensor.is_floating_point():
        return tensor.detach().double().requires_grad_(tensor.requires_grad)
    return tensor
