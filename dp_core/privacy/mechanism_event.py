"""The interface of all mechanisms: what each protects, what it costs, and how it is described.

A mechanism is one frozen dataclass. Its name in JSON registers it, and its methods are all that
accounting, ledger and statements ask of it; so a new one is a class in `mechanisms` and its tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, ClassVar, Self

import numpy as np

from dp_core.errors import BadInput
from dp_core.privacy.accounting.pld import epsilon_pld
from dp_core.privacy.accounting.profiles import SelfComposed
from dp_core.privacy.accounting.rdp import Floats, pure_dp_rdp


class PrivacyUnit(StrEnum):
    """The unit that is added or removed between neighbouring data sets."""

    EXAMPLE = "example"  # one N-word tuple, as in Hoory et al. 2021
    DOCUMENT = "document"
    PATIENT = "patient"


class NeighboringRelation(StrEnum):
    """Which data sets are neighbours."""

    ADD_REMOVE = "add-or-remove-one"  # one unit is added or removed
    ZERO_OUT = "zero-out-one"  # one unit's contribution is replaced by nothing; n is public
    REPLACE = "replace-one"  # one unit becomes any other; n is public

    @property
    def sensitivity_factor(self) -> int:
        """Most by which neighbours' sums differ, where each unit adds a vector of norm 1 or less.

        Replacing a unit takes one such vector away and adds another.
        """
        return 2 if self is NeighboringRelation.REPLACE else 1

    def describe(self, unit: str = "unit") -> str:
        """Return in words by what neighbouring data sets differ."""
        return {
            NeighboringRelation.ADD_REMOVE: f"one {unit} is added or removed",
            NeighboringRelation.ZERO_OUT: f"one {unit}'s contribution is replaced by nothing",
            NeighboringRelation.REPLACE: f"one {unit} is replaced by any other",
        }[self]


ADD_REMOVE, ZERO_OUT, REPLACE = NeighboringRelation
REGISTRY: dict[tuple[str, int], type[MechanismEvent]] = {}


@dataclass(frozen=True)
class MechanismEvent:
    """Everything that is known of a mechanism: parameters, neighbours, cost, words, JSON.

    Like dp_accounting's `DpEvent` it "completely documents the mathematical behavior and
    assumptions of the mechanism". `unit` is None where nobody stated it (a bare calculation).

    A subclass sets `kind` (and `version`, once its fields change), refuses impossible parameters
    in `__post_init__`, and says what it is: at least `steps`, `describe` and `assumed`.

    Class attributes:
        kind: its name in JSON, with `version`; registers the class.
        title: what was released, in a word or two.
        assumed: what must have been true of the run for its ε to hold, beside its parts'.
        conversions: relations under which `ConvertedRelation` may state it, by a theorem there.
        has_pld: whether its privacy loss distribution is known.
        claimed_by_rdp: whether it, alone, is claimed at the ε of its Rényi curve.
    """

    kind: ClassVar[str] = ""
    version: ClassVar[int] = 1
    title: ClassVar[str] = ""
    assumed: ClassVar[tuple[str, ...]] = ()
    conversions: ClassVar[frozenset[NeighboringRelation]] = frozenset({REPLACE})
    claimed_by_rdp: ClassVar[bool] = False
    unit: PrivacyUnit | None = field(default=None, kw_only=True)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.kind:
            REGISTRY[cls.kind, cls.version] = cls

    def require(self, condition: bool, what: str) -> None:
        """Refuse an impossible parameter.

        Raises:
            BadInput: the condition does not hold.
        """
        if not condition:
            raise BadInput(what, where=self.kind)

    # --- what it protects

    @property
    def relation(self) -> NeighboringRelation:
        """The neighbouring relation for which this event's ε holds."""
        return ADD_REMOVE

    @property
    def parts(self) -> tuple[MechanismEvent, ...]:
        """The mechanisms that this one is made of."""
        return ()

    @property
    def is_unaccounted(self) -> bool:
        """Whether any part has no guarantee."""
        return any(part.is_unaccounted for part in self.parts)

    def stating(self, unit: PrivacyUnit) -> Self:
        """Return the same event with its unit written into it and into all its parts."""
        body = {f.name: _map_events(getattr(self, f.name), unit) for f in fields(self)}
        return replace(self, **body | {"unit": unit})

    def stated_delta(self, delta: float) -> float:
        """Return the δ that belongs to the event's own ε: more than `delta` if converted."""
        return delta

    # --- what it costs

    @property
    def has_pld(self) -> bool:
        """Whether its PLD is known; what has none enters a total as a proven (ε, δ)."""
        return all(part.has_pld for part in self.parts)

    def steps(self) -> list[SelfComposed]:
        """Return the privacy profile of each kind of step, and how often it is taken."""
        raise NotImplementedError

    def rdp(self, orders: Sequence[float]) -> Floats | None:
        """Return the Rényi divergence bound at each order α > 1, or None where none is known."""
        alphas, total = np.asarray(orders, dtype=np.float64), np.zeros(len(orders))
        for step, count in self.steps():
            curve = step.rdp(alphas)
            if curve is None:
                return None
            total = total + count * curve
        return total

    def approximate_rdp(self, order: float, delta: float) -> tuple[float, float]:
        """Return (ρ, δ') of δ'-approximate Rényi DP of a finite order: what a ledger charges.

        With probability δ' at most, by a coin that is the same for both neighbours, anything may
        be released; otherwise their Rényi divergence is at most ρ, in both directions.

        Args:
            order: α > 1, finite.
            delta: δ that may be spent where no Rényi curve is known: the ε at it is (ε, 0)-DP
                but for a coin of probability δ (Kairouz, Oh and Viswanath 2015).
        """
        curve = self.rdp([order])
        if curve is not None:
            return float(curve[0]), 0.0
        return pure_dp_rdp(epsilon_pld(self, delta), order), delta

    def unamplified_mu(self, sensitivity: float) -> float:
        """Return μ of the Gaussian that the same training is on batches from shuffled epochs.

        ∞ where an event has no such reading (a histogram, no guarantee).

        Args:
            sensitivity: by how much a unit moves a sum, in clip norms.
        """
        return math.inf

    # --- what is said of it

    def describe(self) -> str:
        """Return the mechanism in one clause."""
        raise NotImplementedError

    def assumptions(self) -> tuple[str, ...]:
        """Return what must have been true of the run for its ε to hold."""
        return (*dict.fromkeys(a for p in self.parts for a in p.assumptions()), *self.assumed)

    def to_json(self) -> dict[str, Any]:
        """Return the event as plain JSON data; `MechanismEvent.from_json` reads it back."""
        body = {f.name: _plain(getattr(self, f.name)) for f in fields(self)}
        return {"kind": self.kind, "version": self.version, **body}

    @staticmethod
    def from_json(data: dict[str, Any]) -> MechanismEvent:
        """Return the event written by `to_json`.

        Raises:
            BadInput: unknown kind or version, missing or unknown fields, impossible values.
        """
        if not isinstance(data, dict):
            raise BadInput("not an object", where="privacy event")
        kind, version = data.get("kind"), data.get("version")
        named = isinstance(kind, str) and isinstance(version, int)
        cls = REGISTRY.get((kind, version)) if named else None  # type: ignore[arg-type]
        if cls is None:
            raise BadInput(
                f"unknown event kind {kind!r} version {version!r}",
                where="privacy event",
                fix="Use the release of Confide that wrote it, or a newer one.",
            )
        body = {k: _read(v) for k, v in data.items() if k not in ("kind", "version")}
        expected = {f.name for f in fields(cls)}
        if set(body) != expected:
            wrong = ", ".join(sorted(set(body) ^ expected))
            raise BadInput(f"event {kind} has missing or unknown fields: {wrong}", where="event")
        try:
            if body["unit"] is not None:
                body["unit"] = PrivacyUnit(body["unit"])
            return cls(**body)
        except (AttributeError, TypeError, ValueError) as error:
            raise BadInput(f"event {kind} holds values of the wrong type", where="event") from error


def _plain(value: Any) -> Any:
    if isinstance(value, MechanismEvent):
        return value.to_json()
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value.value if isinstance(value, StrEnum) else value


def _read(value: Any) -> Any:
    if isinstance(value, dict):
        return MechanismEvent.from_json(value)
    return tuple(_read(v) for v in value) if isinstance(value, list) else value


def _map_events(value: Any, unit: PrivacyUnit) -> Any:
    if isinstance(value, MechanismEvent):
        return value.stating(unit)
    return tuple(_map_events(v, unit) for v in value) if isinstance(value, tuple) else value
