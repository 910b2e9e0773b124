"""Ends what takes too long, from within the same process."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """Raises TimeoutError in the block once the time is over; None, or a thread other than the main one, has no limit.

    Python code is interrupted, compilers written in it included; a call into a library is left to finish first.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"took longer than {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, stop)
    # Again after a while: a compiler may have taken the first error for one of its own and gone on without.
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 10.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
