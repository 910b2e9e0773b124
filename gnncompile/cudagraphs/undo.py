"""Undoes what the first part of a recording wrote, if it was launched in vain."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnncompile import _compat


class Undo:
    """Copies of small tensors, such as the running statistics of batch norms, as they were before a replay.

    Args:
        written: The tensors that a replay writes to.
    """

    def __init__(self, written: Sequence[Tensor]) -> None:
        groups: dict[torch.dtype, list[Tensor]] = {}
        for tensor in written:
            groups.setdefault(tensor.dtype, []).append(tensor.detach())
        self._groups = [(group, [torch.empty_like(tensor) for tensor in group]) for group in groups.values()]

    def keep(self) -> None:
        """Copies the tensors. A recording does this first."""
        for tensors, copies in self._groups:
            _compat.copy_each(copies, tensors)

    def __call__(self) -> None:
        """Writes the copies back. The versions of the tensors stay, as the replay has not raised them."""
        for tensors, copies in self._groups:
            with torch.no_grad(), _compat.keep_versions(tensors):
                _compat.copy_each(tensors, copies)
