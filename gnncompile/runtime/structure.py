"""Runs a structure program once per distinct graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnncompile import _compat
from gnncompile.passes.assumed import ADVICE
from gnncompile.passes.hoist import Hoisted
from gnncompile.runtime import layout
from gnncompile.runtime.identity import IdentityCache


class Structure:
    """The structure program of one captured graph and what it made."""

    def __init__(self, hoisted: Hoisted, max_entries: int, max_bytes: int) -> None:
        self.hoisted = hoisted
        self.cache = IdentityCache(max_entries, max_bytes)
        fakes = [*hoisted.given, *hoisted.results]
        self.assumed = _compat.assumed_sizes(fakes)
        self.known = _compat.plain_sizes(fakes) if self.assumed else {}

    def __call__(self, args: Sequence[Any]) -> list[Tensor]:
        """The structure for the captured graph's inputs."""
        layout.check_pending()
        found = self.cache.get([args[i] for i in self.hoisted.inputs], self._build)
        if self.assumed:
            self._check_sizes([*args, *found])
        return found

    def _build(self, *inputs: Any) -> list[Tensor]:
        with torch.no_grad():
            return [t.contiguous() for t in self.hoisted.program(*inputs)]

    def _check_sizes(self, tensors: list[Any]) -> None:
        """Raises RuntimeError where the capture took a size that depends on data for another one, which it is not."""
        sizes = {symbol: _size(tensors, where) for symbol, where in self.known.items()}
        for where, expected in self.assumed:
            found = _size(tensors, where)
            if found != expected.subs(sizes):
                raise RuntimeError(f"found {found} rows, expected {expected.subs(sizes)}: {ADVICE}")


def _size(tensors: list[Any], where: tuple[int, int | None]) -> int:
    """A dimension of one of the tensors, or a number among them."""
    found = tensors[where[0]]
    return int(found if where[1] is None else found.shape[where[1]])
