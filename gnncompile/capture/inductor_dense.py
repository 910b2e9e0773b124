"""How Inductor adds a product to a matrix that nobody reads afterwards: into the memory of that matrix."""

from __future__ import annotations

from typing import Any

import torch

from gnncompile._compat.inductor import V, fallback_handler, ir, register_lowering
from gnncompile.capture.inductor_call import Call
from gnncompile.runtime import dense_ops  # noqa: F401  (defines the op)

_OP = torch.ops.gnncompile.add_product.default


class ProductInPlace(Call):
    """Adds ``left @ right`` to `total`: ``[n, m] += [n, k] @ [k, m]``, given in this order."""

    def codegen(self, wrapper: Any) -> None:
        """Writes the call."""
        total, left, right = self.references()
        wrapper.writeline(f"extern_kernels.addmm({total}, {left}, {right}, alpha=1, beta=1, out={total})")


def _lower(total: Any, left: Any, right: Any) -> Any:
    if V.graph.cpp_wrapper:
        return fallback_handler(_OP, add_to_fallback_set=False)(total, left, right)
    given = [ir.ExternKernel.realize_input(t) for t in (total, left, right)]
    ProductInPlace(given, given[:1])
    return total


def install() -> None:
    """Tells Inductor."""
    register_lowering(_OP, type_promotion_kind=None)(_lower)
