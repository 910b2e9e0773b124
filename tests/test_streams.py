"""Streams of our own stay apart from those that torch gives to others."""

from __future__ import annotations

import pytest
import torch

from gnncompile.runtime import streams

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
