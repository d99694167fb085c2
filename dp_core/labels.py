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
class Dp:
    """A value protected by a differential-privacy guarantee."""

    value: float
    label = Label.DP


@dataclass(frozen=True)
class Public:
    """A value that no private data influenced."""

    value: float
    label = Label.PUBLIC


@dataclass(frozen=True)
class Operator:
    """A value computed from private data without noise."""

    value: float
    label = Label.OPERATOR


Publishable = Dp | Public
Labelled = Dp | Public | Operator
