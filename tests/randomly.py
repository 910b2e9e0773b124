"""The number of examples that hypothesis tries: a few, the same in every run, or many new ones.

``GNNCOMPILE_TEST_EXAMPLES=50 pytest tests/kernels/test_properties.py`` tries 50 times as many, with new seeds in each
run. ``--hypothesis-seed=7`` repeats such a run.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, Phase, settings

TIMES = int(os.environ.get("GNNCOMPILE_TEST_EXAMPLES", "0"))


def examples(count: int) -> Any:
    """Returns a decorator for tests under ``given``: `count` examples, times the environment variable if set."""
    return settings(
        max_examples=count * max(TIMES, 1),
        derandomize=not TIMES,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=bool(TIMES),
    )
