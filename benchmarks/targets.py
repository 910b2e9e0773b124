"""How much faster than others a row is meant to be."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """Least ratios of the others' times to ours; None where there is nothing to reach.

    Attributes:
        over_eager: over eager PyTorch.
        over_compile: over the faster of `torch.compile` and `torch.compile(dynamic=True)`.
    """

    over_eager: float | None = None
    over_compile: float | None = None

    def verdict(self, over_eager: float | None, over_compile: float | None) -> str:
        """Compares measured ratios; None means that the other row, or ours, has no time.

        Returns:
            `ok` if all that was measured is reached, `SHORT` if something is missed, and `no baseline` if nothing could
            be compared, because the others crashed or were left out.
        """
        wanted = ((self.over_eager, over_eager), (self.over_compile, over_compile))
        compared = [found >= least for least, found in wanted if least is not None and found is not None]
        if not compared:
            return "no baseline"
        return "ok" if all(compared) else "SHORT"

    def __str__(self) -> str:
        wanted = (("eager", self.over_eager), ("compile", self.over_compile))
        return ", ".join(f"{least:g}x {name}" for name, least in wanted if least is not None)
