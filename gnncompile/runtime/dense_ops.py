"""``gnncompile::add_product(total, left, right)``: ``total + left @ right`` in the memory of `total`, once compiled.

Torch's ``addmm`` copies what it adds to before the library adds the product. Here the caller promises that nobody reads
`total` afterwards, and :mod:`gnncompile.capture.inductor_dense` adds to it in place. Called in any other way the op
returns a new tensor, so that a graph is right with or without Inductor.
"""

from __future__ import annotations

import torch
from torch import Tensor

LIBRARY = torch.library.Library("gnncompile", "FRAGMENT")
LIBRARY.define("add_product(Tensor total, Tensor left, Tensor right) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """``[n, m] + [n, k] @ [k, m]``, all of one floating dtype."""
    return torch.addmm(total, left, right)


def _fake(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return total.new_empty((left.size(0), right.size(1)))


LIBRARY.impl("add_product", _add_product, "CompositeExplicitAutograd")
torch.library.register_fake("gnncompile::add_product", _fake, lib=LIBRARY)
