"""The settings of captures that a model may change, and what follows after a capture failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GCNConv
from torch_geometric.typing import SparseTensor

import gnncompile
from gnncompile._compat import Recapture, Setting
from gnncompile.capture.compile import callable_of
from gnncompile.capture.policy import CapturePolicy, Outcome
from gnncompile.exc import SecondDerivativeError
from gnncompile.layout.batch_metadata import Bucketed, RowLimit

CHANGES: dict[Setting, tuple[Any, Callable[[CapturePolicy], Any], Any]] = {
    Setting.SIZES: (("L['args'][0]", True), lambda p: (p.derived.wanted, p.derived.lengths), ({"args[0]"},) * 2),
    Setting.PADDING: (False, lambda p: p.pads, False),
    Setting.SELF_LOOPS: ("exact", lambda p: p.backend.self_loops, "exact"),
    Setting.EMPTY_SIZES: (True, lambda p: p.empty_is_special, True),
    Setting.MADE_MATRICES: (False, lambda p: p.backend.makes_matrices, False),
    Setting.SPLIT_EDGE_LISTS: (False, lambda p: p.derived.splits, False),
    Setting.GRADIENTS: (False, lambda p: p.backend.captures_gradients, False),
}
"""For each setting of captures: a value, the setting of a policy, and what it is afterwards."""

OTHERS: dict[Setting, tuple[Any, Outcome]] = {
    Setting.ROWS: (RowLimit(0, "nodes", 2), Outcome.RETRY),
    Setting.WATCHED_LAYERS: (GCNConv(2, 2), Outcome.RETRY),
    Setting.UNCOMPILED_INPUTS: (SparseTensor, Outcome.EAGER),
}


def _policy(**settings: Any) -> CapturePolicy:
    def fn(x: Tensor) -> Tensor:
        return x + 1

    program = callable_of(gnncompile.compile(fn, **settings))
    assert program is not None
    program.policy.pads = True
    return program.policy


def test_every_setting_is_tested():
    assert CHANGES.keys() | OTHERS.keys() == set(Setting)


@pytest.mark.parametrize("setting", CHANGES)
def test_a_setting_changes_once_and_is_noted_once(setting: Setting):
    policy, (value, read, expected) = _policy(), CHANGES[setting]
    asked = Recapture(setting, value, "a reason", "a part", "model.py:1: x")
    assert read(policy) != expected
    assert policy.adjust(asked) is Outcome.RESTART and read(policy) == expected
    assert policy.adjust(asked) is Outcome.UNCHANGED and read(policy) == expected
    assert [(n.what, n.reason, n.line) for n in policy.backend.notes] == [("a part", "a reason", "model.py:1: x")]


@pytest.mark.parametrize("setting", OTHERS)
def test_what_is_no_setting_of_captures(setting: Setting):
    policy, (value, outcome) = _policy(), OTHERS[setting]
    assert policy.adjust(Recapture(setting, value, "a reason")) is outcome
    assert policy.backend.notes == []


@pytest.mark.parametrize("setting", Setting)
def test_a_frame_changes_no_setting_of_a_whole_call(setting: Setting):
    policy = _policy()
    value = CHANGES[setting][0] if setting in CHANGES else OTHERS[setting][0]
    of_calls = setting in OTHERS or setting is Setting.GRADIENTS
    backend = policy.backend
    assert policy.adjust_frame(Recapture(setting, value, "a reason")) is not of_calls
    assert policy.backend is backend and backend.captures_gradients
    assert not policy.adjust_frame(Recapture(setting, value, "a reason"))


def test_limits_of_rows():
    """A limit begins the call again, unpadded; a second time it can't help, so that no call begins forever."""
    policy, limit = _policy(), RowLimit(1, "edges", 0, is_excluded=True)
    assert policy.adjust(Recapture(Setting.ROWS, limit, "a reason")) is Outcome.RETRY and policy.limits == {limit}
    assert policy.adjust(Recapture(Setting.ROWS, limit, "a reason")) is Outcome.UNCHANGED and policy.pads
    assert policy.adjust_call(Recapture(Setting.ROWS, limit, "a reason"), padded=True) is Outcome.RESTART
    assert not policy.pads


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_which_mini_batches_a_limit_admits(count: int):
    batch = Bucketed(("nodes", "edges"), (5, count), (8, 8), torch.tensor([5, count]), 2)
    assert RowLimit(1, "edges", 2).is_met(batch) == (count >= 2)
    assert RowLimit(1, "edges", 1, is_excluded=True).is_met(batch) == (count != 1)
    for other in (RowLimit(1, "edges", None), RowLimit(1, "graphs", 9), RowLimit(2, "graphs", 9)):
        assert other.is_met(batch)
    assert str(RowLimit(1, "edges", 2)) == "at least 2 of 'edges'"
    assert str(RowLimit(1, "edges", 1, True)) == "any number but 1 of 'edges'"


def test_self_loops_that_are_off_stay_off():
    policy = _policy()
    assert policy.adjust(Recapture(Setting.SELF_LOOPS, "off", "a reason")) is Outcome.RESTART
    assert policy.adjust(Recapture(Setting.SELF_LOOPS, "exact", "a reason")) is Outcome.UNCHANGED
    assert policy.backend.self_loops == "off"


@pytest.mark.parametrize(
    ("fullgraph", "padded", "outcome"),
    [
        (False, False, Outcome.EAGER),
        (False, True, Outcome.RESTART),
        (True, False, Outcome.UNCHANGED),
        (True, True, Outcome.UNCHANGED),
    ],
)
def test_a_call_that_no_setting_helps(fullgraph: bool, padded: bool, outcome: Outcome):
    for error in (RuntimeError("no"), Recapture(Setting.UNCOMPILED_INPUTS, SparseTensor, "no")):
        policy = _policy(fullgraph=fullgraph)
        assert policy.adjust_call(error, padded) is outcome
        assert policy.pads is (outcome is not Outcome.RESTART)


def test_second_derivatives_are_left_to_torch_or_raised():
    policy = _policy()
    assert policy.adjust_call(SecondDerivativeError("no"), padded=True) is Outcome.RESTART
    assert policy.backend.options.double_backward and not policy.pads
    assert policy.adjust_call(SecondDerivativeError("no"), padded=True) is Outcome.UNCHANGED
