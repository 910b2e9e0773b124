"""PyG's own hooks on message passing (``register_message_forward_hook`` and the like), which no compiled code runs.

PyG leaves them out under any compiler, without a word. Hooks of ``torch.nn.Module`` do run.
"""

from __future__ import annotations

import warnings
from operator import itemgetter
from typing import Any

from torch import nn
from torch_geometric.nn import MessagePassing

_STEPS = ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
_ATTRIBUTES = {
    f"_{step}_forward{pre}_hooks": f"register_{step}_forward{pre}_hook" for step in _STEPS for pre in ("_pre", "")
}

_HOOKS = itemgetter(0)


class SkippedHooks:
    """Says once per layer that its hooks do not run.

    Attributes:
        found: What was said.
    """

    def __init__(self, target: Any) -> None:
        self.found: list[str] = []
        layers = target.named_modules() if isinstance(target, nn.Module) else ()
        self._watched = [
            (getattr(layer, attribute), f"{name or 'the model'} ({type(layer).__name__}): {register}")
            for name, layer in layers
            if isinstance(layer, MessagePassing)
            for attribute, register in _ATTRIBUTES.items()
            if hasattr(layer, attribute)
        ]

    def __call__(self) -> None:
        """Warns of hooks that were not there at the last call."""
        if not any(map(_HOOKS, self._watched)):
            return
        for hooks, what in self._watched:
            if hooks:
                self.found.append(f"a hook of {what} does not run in compiled code")
                warnings.warn(
                    f"gnncompile: {self.found[-1]}, as PyG skips it under every compiler. Use register_forward_hook, "
                    "which does run, or gnncompile.compile(model, disable=True) while the hook is needed.",
                    stacklevel=4,
                )
        self._watched = [(hooks, what) for hooks, what in self._watched if not hooks]
