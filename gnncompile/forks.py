"""What a forked process does first: a fork copies locks that threads hold, but not these threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[[], None])


def after_fork(function: F) -> F:
    """Makes each forked process call a function right after the fork. On systems without forks, it is never called.

    Args:
        function: Replaces locks, or forgets what threads had begun.

    Returns:
        The function itself, so that this is a decorator.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
    return function
