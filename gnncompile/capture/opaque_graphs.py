"""Captured graphs that the passes leave as they are, because a part of what they do stands in another graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from gnncompile import _compat
from gnncompile.capture.higher_order import bodies, unhidden
from gnncompile.ops.segment import WRITTEN_OUT

_OPS: Any = torch.ops.gnncompile

_INPUTS = {_OPS.sized, _OPS.laid_out, _OPS.hop_prefix}
"""Marker ops that run as what they return: they come with the inputs."""


def why_opaque(gm: fx.GraphModule) -> str | None:
    """Why a Dynamo graph is left as it is; None for most."""
    if unhidden(gm):
        return "it holds a nested graph (control flow)"
    if _compat.uses_transforms(gm):
        return "it holds a transform of torch.func, or forward-mode differentiation"
    return None


def markers(gm: fx.GraphModule) -> set[Any]:
    """The marker ops in a graph and in those within it."""
    found = {packet for node in gm.graph.nodes if (packet := _packet(node.target)) is not None}
    return found.union(*map(markers, bodies(gm)))


def written_out(gm: fx.GraphModule) -> bool:
    """Whether all markers, in the graphs within it too, mean the same as torch ops, by which they are replaced then."""
    if not markers(gm) <= _INPUTS | WRITTEN_OUT.keys():
        return False
    for one in (gm, *bodies(gm)):
        for node in one.graph.nodes:
            node.target = WRITTEN_OUT.get(node.target, node.target)
        one.recompile()
    return all(map(written_out, bodies(gm)))


def _packet(target: Any) -> Any:
    """The op of ours that a node calls, or None."""
    packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
    ours = isinstance(packet, torch._ops.OpOverloadPacket) and str(packet).startswith("gnncompile.")
    return packet if ours else None
