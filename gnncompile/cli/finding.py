"""What `doctor` finds: one thing, how it stands with it, and how to mend it."""

from __future__ import annotations

from dataclasses import dataclass

OK, NOTE, SLOW, WRONG = "ok", "note", "slow", "wrong"
"""Levels: fine; fine, and worth knowing; works, but slower than it could; does not work, or not as asked."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: What was looked at.
        level: :data:`OK`, :data:`NOTE`, :data:`SLOW` or :data:`WRONG`.
        found: What was found.
        remedy: What to do; nothing if there is nothing to do.
    """

    name: str
    level: str
    found: str
    remedy: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether there is something to mend."""
        return self.level in (SLOW, WRONG)
