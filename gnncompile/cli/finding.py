"""One finding of the `doctor` command: what was checked, the result, and how to mend a problem."""

from __future__ import annotations

from dataclasses import dataclass

OK, NOTE, SLOW, WRONG = "ok", "note", "slow", "wrong"
"""Levels: fine; fine, but worth knowing; works, but slower than possible; does not work, or not as asked."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: The subject of the check.
        level: :data:`OK`, :data:`NOTE`, :data:`SLOW` or :data:`WRONG`.
        found: The result, in words.
        remedy: What to do; "" if there is nothing to do.
    """

    name: str
    level: str
    found: str
    remedy: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether there is something to mend."""
        return self.level in (SLOW, WRONG)
