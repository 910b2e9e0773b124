"""Stops code that takes too long, from within the same process."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """Raises TimeoutError in the block once the time is over. None means no limit; only the main thread has a limit.

    Python code is interrupted, also that of compilers; a call into a native library finishes first.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"took longer than {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, stop)
    # The signal repeats, because a compiler may catch the first error as one of its own and continue.
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 10.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
