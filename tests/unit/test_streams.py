"""Captures stay apart from what others do: streams of our own, no garbage collected meanwhile."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from gnncompile.cudagraphs import cuda_graph
from gnncompile.layout import streams

pytestmark = pytest.mark.gpu
POOL = 32
"""So many streams torch has for each priority."""


def test_captures_share_no_stream_with_anyone():
    """A copy that another thread starts meanwhile would be part of the graph, and its event could not be waited for."""
    device = torch.device("cuda", torch.cuda.current_device())
    ordinary = {torch.cuda.Stream(device).cuda_stream for _ in range(2 * POOL)}
    assert streams.capturing(device).cuda_stream not in ordinary
    assert streams.capturing(device) is streams.capturing(device)


def test_loaders_take_no_more_than_one_stream():
    device = torch.device("cuda", torch.cuda.current_device())
    assert streams.copying(device) is streams.copying(device)
    assert streams.copying(device).cuda_stream != streams.capturing(device).cuda_stream


def test_garbage_is_left_alone_in_a_capture():
    """To destroy a graph, which may be garbage, is an error inside a capture, and nobody is told where."""
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(4, device=device)

    def recorded(work: Any) -> Any:
        record = cuda_graph.recorder(device)
        assert record is not None
        return record(work)

    old = [recorded(lambda: x + 1)]

    def work() -> torch.Tensor:
        cycle: list[Any] = [old.pop()]
        cycle.append(cycle)
        del cycle
        kept = [[k] for k in range(1000)]
        return x + len(kept)

    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        replay, made = recorded(work)
    finally:
        gc.set_threshold(*thresholds)
    assert gc.isenabled()
    replay()
    assert torch.equal(made, x + 1000)
