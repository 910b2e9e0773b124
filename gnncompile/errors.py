"""The errors gnncompile raises. Each names the argument, what was found, what was expected and what to do."""

from __future__ import annotations


class Unsupported(Exception):  # noqa: N818  (named after what it says of a region)
    """A region that a generator can't express; the reference interpreter runs it instead."""
