"""Finds layers with PyG's message-passing hooks or an explainer's masks, so that their calls run uncompiled.

Under any compiler, PyG silently skips its own hooks (``register_message_forward_hook`` and others). A layer that is
being explained takes another mask in each call, for the edges along which PyG itself would pass messages. So a call
runs uncompiled if a layer has such hooks or is being explained. Hooks of ``torch.nn.Module`` run in compiled code.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import nn
from torch_geometric.nn import MessagePassing

from gnncompile import _compat
from gnncompile.substitutes.submodules import modules_of

_STEPS = ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
_HOOKS = {
    f"_{step}_forward{pre}_hooks": f"register_{step}_forward{pre}_hook" for step in _STEPS for pre in ("_pre", "")
}
_NAMES = tuple(_HOOKS)
_EXPLAINED = attrgetter("_explain")


def _no_model() -> None:
    """Stands for a model that is gone."""


class LayerWatch:
    """Watches a model's message-passing layers: those in its modules, and those that only a trace finds.

    Calling the watch takes a few microseconds, however many hooks could be registered.
    """

    def __init__(self, target: Callable[..., Any]) -> None:
        self._target = target
        self._found: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._names: dict[nn.Module, str] = {}
        self._tables: list[dict[str, Any]] = []
        self._parts: list[Any] = []
        self._layers: list[nn.Module] = []
        self._hooks: list[Any] = []
        self._read()

    def __contains__(self, layer: object) -> bool:
        return layer in self._names

    def __call__(self) -> tuple[str, str] | None:
        """The reason that a call must run uncompiled now, and advice for the user; None if it need not."""
        if list(chain.from_iterable(map(dict.values, self._tables))) != self._parts:
            self._read()
        if not any(self._hooks) and not any(map(_EXPLAINED, self._layers)) and not self._found:
            return None
        return next(filter(None, map(self._reason, [*self._names, *self._found])), None)

    def add(self, layer: nn.Module) -> None:
        """Watches a layer that belongs to none of the model's modules."""
        self._found.add(layer)

    def modules(self) -> Sequence[nn.Module]:
        """The modules that the model consists of, without those inside of them."""
        return modules_of(self._target)

    def let_go(self) -> None:
        """Forgets the model and its layers."""
        self._target = _no_model
        self._read()

    def _read(self) -> None:
        roots = self.modules()
        modules = list(dict.fromkeys(chain.from_iterable(root.modules() for root in roots)))
        self._tables = [module._modules for module in modules if module._modules]
        self._parts = list(chain.from_iterable(table.values() for table in self._tables))
        named = chain.from_iterable(root.named_modules() for root in roots)
        self._names = {layer: name for name, layer in named if isinstance(layer, MessagePassing)}
        self._layers = [layer for layer in self._names if hasattr(layer, "_explain")]
        self._hooks = [getattr(layer, hooks) for layer in self._names for hooks in _HOOKS if hasattr(layer, hooks)]

    def _reason(self, layer: Any) -> tuple[str, str] | None:
        name = f"{self._names.get(layer) or 'the layer'} ({type(layer).__name__})"
        if getattr(layer, "_explain", False):
            return (
                f"{name} is being explained (explain=True), and PyG masks its messages in uncompiled code; calls "
                "meanwhile",
                "Calls without an explainer run compiled again.",
            )
        registered = next((register for hooks, register in _HOOKS.items() if getattr(layer, hooks, None)), None)
        if registered is None:
            return None
        return (
            f"{name} has a hook of {registered}, which PyG runs in uncompiled code only; calls meanwhile",
            "Remove the hook, or use register_forward_hook, which runs in compiled code.",
        )


def refuse_hooks(layer: Any) -> None:
    """Refuses a layer with hooks while Dynamo traces, and guards on the hooks of a layer that has none.

    Layers that a :class:`LayerWatch` knows are skipped: the watch checks them before each call.

    Raises:
        _compat.Recapture: The layer has hooks, or is being explained.
    """
    if _compat.is_watched(layer):
        return
    if layer._explain:
        _compat.refuse_layer(layer)
    for hooks in _NAMES:
        if len(getattr(layer, hooks)):  # Dynamo guards on the length, but would not on the truth value
            _compat.refuse_layer(layer)
