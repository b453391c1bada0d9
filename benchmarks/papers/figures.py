"""Pairs a published figure with ours, and lists the sources of the figures."""

from dataclasses import asdict, dataclass

SPARE, FT_HSDP, TORCHPASS, RESIHP, AIM = (
    "SPARe, arXiv 2603.00357",
    "FT-HSDP, arXiv 2602.00277",
    "TorchPass benchmark",
    "ResiHP, arXiv 2605.06374",
    "aim",
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure. ``published`` and ``tolerance`` are None where nothing was published: ``ok`` is then
    True.

    ``tolerance`` is absolute, in the unit of the figure. ``bound``: ours must be "within" the tolerance of
    ``published``, or "at most" or "more than" it. A "shape" figure has none: other figures judge its table.
    """

    id: str
    source: str
    published: float | None
    ours: float
    tolerance: float | None
    ok: bool
    bound: str = "within"

    @property
    def deviation(self) -> float | None:
        """Our value minus the published value, as a share of the published value."""
        return self.ours / self.published - 1 if self.published else None

    def as_dict(self) -> dict[str, object]:
        return asdict(self)
