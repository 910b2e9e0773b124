"""Runs a structure program once per distinct graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnncompile.passes.hoist import Hoisted
from gnncompile.runtime import layout
from gnncompile.runtime.identity import IdentityCache


class Structure:
    """The structure program of one captured graph and what it made."""

    def __init__(self, hoisted: Hoisted, max_entries: int, max_bytes: int) -> None:
        self.hoisted = hoisted
        self.cache = IdentityCache(max_entries, max_bytes)

    def __call__(self, args: Sequence[Any]) -> list[Tensor]:
        """The structure for the captured graph's inputs."""
        layout.check_pending()
        return self.cache.get([args[i] for i in self.hoisted.inputs], self._build)

    def _build(self, *inputs: Any) -> list[Tensor]:
        with torch.no_grad():
            return list(self.hoisted.program(*inputs))
