"""What processes write to the store of their group."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from gnncompile.layout import agreement

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs a torch with torch.distributed")


def test_the_store_keeps_the_last_round_only(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()

    class Group:
        def get_group_store(self) -> Any:
            return store

    monkeypatch.setattr(agreement, "group_of", lambda name: Group())
    monkeypatch.setattr(agreement, "_rounds", Counter())
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1)
    for step in range(5):
        assert agreement.collect("a group", "a step", [str(step)]) == [[str(step)]]
        assert store.num_keys() == 1
