"""Chooses cases and rows by the names on the command line."""

from collections.abc import Sequence
from typing import Protocol, TypeVar


class UnknownNameError(ValueError):
    """The command line contains an unknown name; the exit status is 2."""


class Named(Protocol):
    """A case, or a row of a table."""

    @property
    def name(self) -> str:
        """The name."""


N = TypeVar("N", bound=Named)


def named(known: Sequence[N], names: Sequence[str]) -> list[N]:
    """Returns the cases or rows with the given names, in the order of the table.

    Raises:
        UnknownNameError: a name is not among them.
    """
    refuse_unknown("rows", names, [one.name for one in known])
    return [one for one in known if one.name in names]


def chosen(known: Sequence[N], names: str | None) -> list[N]:
    """Returns the rows that `--rows` names, comma-separated; all of them if it was not given.

    Raises:
        UnknownNameError: a name is not among them.
    """
    return list(known) if not names else named(known, names.split(","))


def refuse_unknown(argument: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Checks the names that the command line gives.

    Args:
        argument: what the names stand for; the error begins with it.
        names: the given names.
        known: all names.

    Raises:
        UnknownNameError: a name is not known.
    """
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UnknownNameError(f"{argument}: got {', '.join(unknown)}, expected some of {', '.join(known)}")
