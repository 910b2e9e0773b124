"""Captured graphs that the passes leave as they are, because nested graphs or transforms define a part of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from gnncompile import _compat
from gnncompile.capture.higher_order import bodies, unhidden
from gnncompile.ops.segment import WRITTEN_OUT

_OPS: Any = torch.ops.gnncompile

_INPUTS = {_OPS.sized, _OPS.laid_out, _OPS.hop_prefix}
"""Marker ops on the inputs. At run time each returns its argument unchanged."""


def why_opaque(gm: fx.GraphModule) -> str | None:
    """The reason that the passes leave a Dynamo graph as it is; None if they don't."""
    if unhidden(gm):
        return "it holds a nested graph (control flow)"
    if _compat.uses_transforms(gm):
        return "it holds a transform of torch.func, or forward-mode differentiation"
    return None


def markers(gm: fx.GraphModule) -> set[Any]:
    """The ops of gnncompile in a graph and its nested graphs."""
    found = {packet for node in gm.graph.nodes if (packet := _packet(node.target)) is not None}
    return found.union(*map(markers, bodies(gm)))


def written_out(gm: fx.GraphModule) -> bool:
    """Replaces the markers of a graph and its nested graphs by torch ops; markers on inputs stay.

    Returns False, and replaces nothing, if there is a marker without torch ops.
    """
    if not markers(gm) <= _INPUTS | WRITTEN_OUT.keys():
        return False
    for one in (gm, *bodies(gm)):
        for node in one.graph.nodes:
            node.target = WRITTEN_OUT.get(node.target, node.target)
        one.recompile()
    return all(map(written_out, bodies(gm)))


def _packet(target: Any) -> Any:
    """The op of gnncompile that a node calls, or None."""
    packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
    ours = isinstance(packet, torch._ops.OpOverloadPacket) and str(packet).startswith("gnncompile.")
    return packet if ours else None
