"""Dropout on edges becomes part of the regions that read it. A seed takes the place of its mask.

Before: ``dropout(alpha, 0.5, True)`` in a message
After:  ``seed = randint(0, 2**63 - 1, [1])``, an input of every region that reads the dropout
Why it pays: neither the mask nor the masked tensor is written to memory, in the forward or for the backward.

The seed is drawn where the dropout stood, on its device. So ``torch.manual_seed`` repeats results, and the host never
waits.
"""

from __future__ import annotations

import torch
from torch import fx

from gnncompile.ir import philox
from gnncompile.passes.analysis import aten, drop_unused, own, value
from gnncompile.passes.context import Context


def seed_of(ctx: Context, dropout: fx.Node) -> fx.Node:
    """Returns the seed of an ``aten.dropout``. All its readers share the seed, since they need the same mask."""
    if dropout not in ctx.seeds:
        device = value(dropout).device
        with ctx.graph.inserting_before(dropout):
            ctx.seeds[dropout] = ctx.call(
                aten.randint.low, 0, philox.LARGEST_SEED, [1], dtype=torch.int64, device=device, like=dropout
            )
    return ctx.seeds[dropout]


def settle(ctx: Context) -> None:
    """Removes dropouts that only regions read. A dropout with other readers gets the mask of the regions."""
    for dropout in sorted(ctx.seeds, reverse=True):
        seed = ctx.seeds[dropout]
        _remove_dead(ctx, [dropout])
        if dropout.users and seed.users:
            with ctx.graph.inserting_before(dropout):
                arguments = dropout.args[0], seed, dropout.args[1]
                dropout.replace_all_uses_with(ctx.call(own.edge_dropout.default, *arguments, like=dropout))
    _remove_dead(ctx, [*ctx.seeds, *ctx.seeds.values()])
    ctx.seeds.clear()


def _remove_dead(ctx: Context, drawing: list[fx.Node]) -> None:
    """Eliminates dead code, including unused operations of `drawing`, which draw random numbers."""
    drop_unused(ctx.graph)
    left = set(ctx.graph.nodes)
    for node in drawing:
        if node in left and not node.users:
            ctx.graph.erase_node(node)
    drop_unused(ctx.graph)
