"""Runs a structure program once per distinct graph, and caches its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gnncompile import _compat
from gnncompile.exc import StructureSizeError
from gnncompile.layout import bad_indices
from gnncompile.layout.identity_cache import IdentityCache

ADVICE = (
    "a selection of rows (x[mask], unique, ...) has another size than what it is combined with, and the model was "
    'captured for equal ones. Compile it with options={"selections": False}.'
)


@dataclass(frozen=True)
class StructureProgram:
    """The part of a captured graph that depends only on graph structure.

    Attributes:
        module: Takes the graph inputs at the indices `inputs`. Returns one result for each input that the rest of the
            graph gains.
        inputs: The indices of its inputs among the inputs of the captured graph.
        given: Fake values of all inputs of the captured graph.
        results: Fake values of the results of the program.
        copied: The results of the captured graph that copy a result of the program, as pairs of their indices.
    """

    module: fx.GraphModule
    inputs: tuple[int, ...]
    given: tuple[Any, ...]
    results: tuple[Any, ...]
    copied: tuple[tuple[int, int], ...] = ()


class StructureCache:
    """Runs the structure program of one captured graph, and caches its results for each input graph.

    Args:
        program: The program.
        run: Does the same as the module of the program, in less time.
        max_entries: The most graphs that are remembered.
        max_bytes: The most bytes that are remembered.
    """

    def __init__(
        self, program: StructureProgram, run: Callable[..., Sequence[Tensor]], max_entries: int, max_bytes: int
    ) -> None:
        self.program, self._run = program, run
        self.cache = IdentityCache(max_entries, max_bytes)
        fakes = [*program.given, *program.results]
        self.assumed = _compat.assumed_sizes(fakes)
        self.known = _compat.plain_sizes(fakes) if self.assumed else {}

    def __call__(self, args: Sequence[Any]) -> list[Tensor]:
        """Returns the graph structure for the inputs of the captured graph."""
        bad_indices.check_pending()
        found = self.cache.get([args[i] for i in self.program.inputs], self._build)
        if self.assumed:
            self._check_sizes([*args, *found])
        return found

    def _build(self, *inputs: Any) -> list[Tensor]:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._build(*inputs)
        return [t.contiguous() for t in self._run(*inputs)]

    def _check_sizes(self, tensors: list[Any]) -> None:
        """Raises StructureSizeError if a data-dependent size differs from the size that the capture assumed for it."""
        sizes = {symbol: _size(tensors, where) for symbol, where in self.known.items()}
        for where, expected in self.assumed:
            found = _size(tensors, where)
            if found != expected.subs(sizes):
                raise StructureSizeError(f"found {found} rows, expected {expected.subs(sizes)}: {ADVICE}")


def _size(tensors: list[Any], where: tuple[int, int | None]) -> int:
    """Returns a dimension of one of the tensors, or a number among them."""
    found = tensors[where[0]]
    return int(found if where[1] is None else found.shape[where[1]])
