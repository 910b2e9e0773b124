"""Errors about indices that a GPU met come at the next call, once."""

from __future__ import annotations

import pytest
import torch

from gnncompile.device import ALIGNMENT
from gnncompile.layout import bad_indices


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> bad_indices._Notes:
    """The notes of a process with a GPU, in memory that is not pinned."""
    made = bad_indices._Notes(torch.zeros(bad_indices._Notes.NUMBER, ALIGNMENT, dtype=torch.bool))
    monkeypatch.setattr(bad_indices, "_notes", [made])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def test_an_error_names_the_sizes_of_its_layout(notes: bad_indices._Notes) -> None:
    places = [notes.take((k, 2 * k)) for k in range(5)]
    bad_indices.check_pending()
    places[3].fill_(True)
    with pytest.raises(IndexError, match="0 to 2 and 0 to 5"):
        bad_indices.check_pending()
    bad_indices.check_pending()


def test_one_graph_is_one_error(notes: bad_indices._Notes) -> None:
    """A bad edge is in the layouts by both of its ends."""
    for place in [notes.take((7, 7)) for _ in range(2)]:
        place.fill_(True)
    with pytest.raises(IndexError, match="0 to 6"):
        bad_indices.check_pending()
    bad_indices.check_pending()


def test_notes_that_are_made_in_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with a GPU as the default device."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, pin_memory, **named: zeros(*sizes, **named))
    with torch.inference_mode(), torch.device("meta"):
        notes = bad_indices._new_notes()
    notes.take((4, 4)).fill_(True)
    assert notes.is_any_set() and notes.clear() == (4, 4) and not notes.is_any_set()


def test_places_are_taken_in_turn(notes: bad_indices._Notes) -> None:
    first = notes.take((1, 1))
    others = [notes.take((2, 2)) for _ in range(notes.NUMBER - 1)]
    assert len({one.data_ptr() for one in (first, *others)}) == notes.NUMBER
    assert all(one.data_ptr() % ALIGNMENT == first.data_ptr() % ALIGNMENT for one in others)
    again = notes.take((9, 9))
    assert again.data_ptr() == first.data_ptr()
    again.fill_(True)
    with pytest.raises(IndexError, match="0 to 8"):
        bad_indices.check_pending()


def test_no_error_while_a_cuda_graph_is_captured(notes: bad_indices._Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    notes.take((1, 1)).fill_(True)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        bad_indices.check_pending()
    with pytest.raises(IndexError):
        bad_indices.check_pending()
