"""A structure program, what it made, and when it runs: once per distinct graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gnncompile import _compat
from gnncompile.exc import StructureSizeError
from gnncompile.layout import csr
from gnncompile.layout.identity_cache import IdentityCache

ADVICE = (
    "a selection of rows (x[mask], unique, ...) has another size than what it is combined with, and the model was "
    'captured for equal ones. Compile it with options={"selections": False}.'
)


@dataclass(frozen=True)
class StructureProgram:
    """The part of a captured graph that depends on structure alone.

    Attributes:
        module: Takes the graph inputs named by `inputs`, returns one result per added input of the rest.
        inputs: Positions among the captured graph's inputs.
        given: Fake values of all inputs of the captured graph.
        results: Fake values of the results.
        copied: Which results of the captured graph are copies of results of the program: both positions.
    """

    module: fx.GraphModule
    inputs: tuple[int, ...]
    given: tuple[Any, ...]
    results: tuple[Any, ...]
    copied: tuple[tuple[int, int], ...] = ()


class StructureCache:
    """The structure program of one captured graph, and what it made from each graph."""

    def __init__(self, program: StructureProgram, max_entries: int, max_bytes: int) -> None:
        self.program = program
        self.cache = IdentityCache(max_entries, max_bytes)
        fakes = [*program.given, *program.results]
        self.assumed = _compat.assumed_sizes(fakes)
        self.known = _compat.plain_sizes(fakes) if self.assumed else {}

    def __call__(self, args: Sequence[Any]) -> list[Tensor]:
        """The structure for the captured graph's inputs."""
        csr.check_pending()
        found = self.cache.get([args[i] for i in self.program.inputs], self._build)
        if self.assumed:
            self._check_sizes([*args, *found])
        return found

    def _build(self, *inputs: Any) -> list[Tensor]:
        with torch.no_grad():
            return [t.contiguous() for t in self.program.module(*inputs)]

    def _check_sizes(self, tensors: list[Any]) -> None:
        """Raises RuntimeError where the capture took a size that depends on data for another one, which it is not."""
        sizes = {symbol: _size(tensors, where) for symbol, where in self.known.items()}
        for where, expected in self.assumed:
            found = _size(tensors, where)
            if found != expected.subs(sizes):
                raise StructureSizeError(f"found {found} rows, expected {expected.subs(sizes)}: {ADVICE}")


def _size(tensors: list[Any], where: tuple[int, int | None]) -> int:
    """A dimension of one of the tensors, or a number among them."""
    found = tensors[where[0]]
    return int(found if where[1] is None else found.shape[where[1]])
