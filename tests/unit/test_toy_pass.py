"""The recipe "How to add a pass" of docs/contributing.md: a file with `run`, and a row in one of two tuples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

import gnncompile
from gnncompile.passes import manager
from gnncompile.passes.analysis import aten, drop_unused
from gnncompile.passes.context import Context
from gnncompile.passes.manager import Pass


def double_negatives(ctx: Context) -> None:
    """Before: ``neg(neg(x))``; after: ``x``."""
    for node in ctx.graph.find_nodes(op="call_function", target=aten.neg.default):
        inner: Any = node.args[0]
        if inner.target is aten.neg.default and node not in ctx.written:
            node.replace_all_uses_with(inner.args[0])
        elif inner.op == "placeholder":
            ctx.skip("a negative", "it is the only one", node)
    drop_unused(ctx.graph)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many negatives each graph has after differentiation, with the pass before differentiation."""
    counts: list[int] = []

    def count(graph: fx.Graph) -> None:
        counts.append(len(graph.find_nodes(op="call_function", target=aten.neg.default)))

    added = Pass("double_negatives", "regions", "pre_grad", double_negatives)
    monkeypatch.setattr(manager, "PRE_GRAD", (*manager.PRE_GRAD[:3], added, *manager.PRE_GRAD[3:]))
    monkeypatch.setattr(manager, "POST_GRAD", (*manager.POST_GRAD, Pass("count", None, "post_grad", count)))
    return counts


def test_a_pass_runs_where_it_stands(seen: list[int]):
    torch._dynamo.reset()
    x = torch.randn(3, 4)
    with torch.compiler.config.patch(force_disable_caches=True):
        model = gnncompile.compile(lambda x: x.neg().neg().sin())
        torch.testing.assert_close(model(x), x.sin())
    assert seen == [0]


def test_what_it_leaves_alone_is_reported(seen: list[int]):
    torch._dynamo.reset()
    report = gnncompile.explain(lambda x: -x, torch.randn(3, 4))
    (skip,) = report.skipped
    assert (skip.what, skip.reason) == ("a negative", "it is the only one") and "test_toy_pass.py" in skip.line


def test_its_option_turns_it_off(seen: list[int]):
    torch._dynamo.reset()
    x = torch.randn(3, 4)
    with torch.compiler.config.patch(force_disable_caches=True):
        gnncompile.compile(lambda x: x.neg().neg().sin(), options={"regions": False})(x)
    assert seen == [2]
