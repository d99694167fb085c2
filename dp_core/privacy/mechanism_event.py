"""The interface of all mechanisms, and mechanisms that are composed of others or unaccounted.

A mechanism is one frozen dataclass, registered by its name in JSON. Accounting, ledger and
statements use its methods alone, so a new mechanism is a class in `mechanisms`, and tests.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from dp_core.errors import BadInput
from dp_core.privacy.accounting.accountants import epsilon_pld, pure_dp_rdp
from dp_core.privacy.accounting.profiles import NO_GUARANTEE, Floats, SelfComposed
from dp_core.privacy.check_evidence import EXAMPLE, neighbours_in_words, title_of, words_of


class PrivacyUnit(StrEnum):
    """The unit that is added or removed between neighbouring data sets."""

    EXAMPLE = "example"  # one N-word tuple, as in Hoory et al. 2021; N is part of the unit
    DOCUMENT = "document"
    PATIENT = "patient"


class NeighboringRelation(StrEnum):
    """Which data sets are neighbours."""

    ADD_REMOVE = "add-or-remove-one"  # one unit is added or removed
    ZERO_OUT = "zero-out-one"  # one unit's contribution is replaced by nothing; n is public
    REPLACE = "replace-one"  # one unit becomes any other; n is public

    def describe(self, unit: str = "unit") -> str:
        """Return the difference of neighbouring data sets in words."""
        return neighbours_in_words(self, unit)


ADD_REMOVE, ZERO_OUT, REPLACE = NeighboringRelation
_TABLE = tomllib.loads(Path(__file__).with_name("assumptions.toml").read_text("utf-8"))
ASSUMED = {kind: tuple(lines) for kind, lines in _TABLE["releases"].items()} | {
    kind: (*lines, *_TABLE["every_training"]) for kind, lines in _TABLE["trainings"].items()
}
STATED: dict[str, str] = _TABLE["statement"] | _TABLE["units"]
REGISTRY: dict[tuple[str, int], type[MechanismEvent]] = {}


@dataclass(frozen=True)
class MechanismEvent:
    """A mechanism: its parameters, neighbouring relation, privacy cost, description and JSON form.

    Like dp_accounting's `DpEvent` it "completely documents the mathematical behavior and
    assumptions of the mechanism". `unit` is None for a bare calculation. `example` says what
    an example is, if that is the unit: 64 words, 256 words, one labelled sentence and one labelled
    text are different units.

    A subclass sets `kind` (and `version`, once its fields change), refuses impossible parameters
    in `__post_init__`, and defines at least `steps`.

    Class attributes:
        kind: its name in JSON, with `version`; registers the class.
        assumed: assumptions about the run on which its ε rests, in addition to its parts', as
            `assumptions.toml` lists them under the kind.
        neighbours: the relation for which its ε holds, if it has no parts.
        every_iterate: whether its ε covers the releases of all steps, and not only the last step's
            result, if it has no parts. A subclass must set it explicitly.
        has_pld: whether its privacy loss distribution is known.
        claimed_by_rdp: whether it, alone, is claimed at the ε of its Rényi curve.
    """

    kind: ClassVar[str] = ""
    version: ClassVar[int] = 1
    assumed: ClassVar[tuple[str, ...]] = ()
    neighbours: ClassVar[NeighboringRelation] = ADD_REMOVE
    every_iterate: ClassVar[bool] = False
    claimed_by_rdp: ClassVar[bool] = False
    unit: PrivacyUnit | None = field(default=None, kw_only=True)
    example: str = field(default="", kw_only=True)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.kind:
            cls.assumed = ASSUMED.get(cls.kind, cls.assumed)
            REGISTRY[cls.kind, cls.version] = cls

    def require(self, condition: bool, message: str) -> None:
        """Refuse an impossible parameter.

        Raises:
            BadInput: the condition does not hold.
        """
        if not condition:
            raise BadInput(message, where=self.kind)

    # --- the protected unit and its neighbours

    @property
    def protects(self) -> tuple[str, NeighboringRelation]:
        """The unit in words, and the relation: equal ones compose."""
        return self.unit_in_words, self.relation

    @property
    def unit_in_words(self) -> str:
        """The unit in words, with what an example is."""
        unit = self.unit.value if self.unit else "unstated unit"
        return f"{unit} of {self.example}" if self.example else unit

    @property
    def relation(self) -> NeighboringRelation:
        """The neighbouring relation for which this event's ε holds; inherited from any parts."""
        return self.parts[0].relation if self.parts else self.neighbours

    @property
    def parts(self) -> tuple[MechanismEvent, ...]:
        """The mechanisms of which this one is composed: all mechanisms in its fields."""
        values = [getattr(self, f.name) for f in fields(self)]
        held = (v if isinstance(v, tuple) else (v,) for v in values)
        return tuple(part for parts in held for part in parts if isinstance(part, MechanismEvent))

    @property
    def is_unaccounted(self) -> bool:
        """Whether any part has no guarantee."""
        return any(part.is_unaccounted for part in self.parts)

    @property
    def covers_every_iterate(self) -> bool:
        """Whether one charge covers the models after several of its updates.

        It does not if the accounting relies on hiding all iterates but the last (for example
        Feldman et al. 2018, arXiv:1808.06651). An event with parts covers them if each part does.
        """
        if self.parts:
            return all(part.covers_every_iterate for part in self.parts)
        return self.every_iterate

    def stating(self, unit: PrivacyUnit, example: str | None = None) -> Self:
        """Return the same event with its unit written into it and into all its parts.

        Args:
            unit: the protected unit.
            example: what an example is; by default it stays as it is.
        """
        body = {f.name: _stating(getattr(self, f.name), unit, example) for f in fields(self)}
        stated = self.example if example is None else example
        return replace(self, **body | {"unit": unit, "example": stated})

    # --- privacy cost

    @property
    def has_pld(self) -> bool:
        """Whether its PLD is known; an event without one enters a total as a proven (ε, δ)."""
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
        """Return (ρ, δ') of δ'-approximate Rényi DP of a finite order, which the ledger charges.

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

    # --- description

    @property
    def title(self) -> str:
        """The kind of release, in a word or two."""
        return title_of(self.to_json())

    def describe(self) -> str:
        """Return the mechanism in one clause, as the evidence pack's script writes it."""
        return words_of(self.to_json())

    def assumptions(self) -> tuple[str, ...]:
        """Return the assumptions about the run on which the ε rests."""
        return (*dict.fromkeys(a for p in self.parts for a in p.assumptions()), *self.assumed)

    def to_json(self) -> dict[str, Any]:
        """Return the event as plain JSON data; `MechanismEvent.from_json` reads it back."""
        body = {f.name: _plain(getattr(self, f.name)) for f in fields(self)}
        if not self.example:
            del body["example"]
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
        body.setdefault("example", "")
        expected = {f.name for f in fields(cls)}
        if set(body) != expected:
            wrong = ", ".join(sorted(set(body) ^ expected))
            raise BadInput(f"event {kind} has missing or unknown fields: {wrong}", where="event")
        try:
            if body["unit"] is not None:
                body["unit"] = PrivacyUnit(body["unit"])
            if body["example"] != "" and not re.fullmatch(EXAMPLE, body["example"], re.ASCII):
                raise ValueError("example")
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


def _stating(value: Any, unit: PrivacyUnit, example: str | None) -> Any:
    if isinstance(value, MechanismEvent):
        return value.stating(unit, example)
    if isinstance(value, tuple):
        return tuple(_stating(v, unit, example) for v in value)
    return value


# --- mechanisms composed of others


def compose(*events: MechanismEvent) -> MechanismEvent:
    """Return all events together, as one: releases on the same data, registered as one plan.

    Raises:
        BadInput: no events, or events with different units or neighbour relations. (A
            patient-level ε and an example-level ε protect different things; their sum protects
            nothing.)
    """
    if not events:
        raise BadInput("nothing to compose", where="compose")
    first = events[0]
    for other in events[1:]:
        if other.protects != first.protects:
            raise BadInput(
                f"{_protects(first)} does not compose with {_protects(other)}",
                where="compose",
                fix="Account for every release by the same unit and neighbour relation.",
            )
    flat = [p for event in events for p in (event.parts if type(event) is Composed else (event,))]
    if len(flat) == 1:
        return flat[0]
    return Composed(tuple(flat), unit=first.unit, example=first.example)


def _protects(event: MechanismEvent) -> str:
    return f"{event.kind} ({event.unit_in_words}, {event.relation.value})"


class Composition(MechanismEvent):
    """The interface of mechanisms that compose their parts, each of which is released."""

    def steps(self) -> list[SelfComposed]:
        """Return the steps of all parts."""
        return [step for part in self.parts for step in part.steps()]

    def rdp(self, orders: Sequence[float]) -> Floats | None:
        """Return the sum of the parts' curves, or None if a part has no curve."""
        curves = [part.rdp(orders) for part in self.parts]
        known = [curve for curve in curves if curve is not None]
        return np.sum(known, axis=0) if len(known) == len(curves) else None

    def approximate_rdp(self, order: float, delta: float) -> tuple[float, float]:
        """Return the sum over the parts, each of which gets an equal share of δ for its coin."""
        share = delta / len(self.parts)
        charges = [part.approximate_rdp(order, share) for part in self.parts]
        return math.fsum(rho for rho, _ in charges), math.fsum(coin for _, coin in charges)


@dataclass(frozen=True)
class Composed(Composition):
    """Several events on the same data; build it with `compose`, which checks and flattens them."""

    kind = "composed"
    events: tuple[MechanismEvent, ...]

    def __post_init__(self) -> None:
        self.require(len(self.events) > 0, "a composition needs at least one event")
        self.require(
            len({self.protects, *(event.protects for event in self.events)}) == 1,
            "events with different units or neighbour relations do not compose",
        )


@dataclass(frozen=True)
class Unaccounted(MechanismEvent):
    """A release without a privacy guarantee: ε is infinite, also in every composition."""

    kind = "unaccounted"
    reason: str

    @property
    def is_unaccounted(self) -> bool:
        """Always true."""
        return True

    def steps(self) -> list[SelfComposed]:
        """Return a step that guarantees nothing."""
        return [SelfComposed(NO_GUARANTEE, 1)]
