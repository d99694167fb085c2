"""Labels that state who may see a number; every value carries its label until it is shown.

`Dp`: a function of released (noised) outputs, public data and settings.
`Public`: settings, and results on public data only.
`Operator`: computed from private data without noise; never leaves the restricted experiment.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Label(StrEnum):
    """The three labels, as they are written in results, metrics and tables."""

    DP = "dp"
    PUBLIC = "public"
    OPERATOR = "operator"


@dataclass(frozen=True)
class _Value:
    value: float


class Dp(_Value):
    """A value protected by a differential-privacy guarantee."""

    label = Label.DP


class Public(_Value):
    """A value that no private data influenced."""

    label = Label.PUBLIC


class Operator(_Value):
    """A value computed from private data without noise."""

    label = Label.OPERATOR


Labelled = Dp | Public | Operator
