"""What is wrong with a command line, beyond what argparse sees."""

from __future__ import annotations


class UsageError(Exception):
    """Names the argument, what was found, what was expected and what to do; the exit status is 2."""
