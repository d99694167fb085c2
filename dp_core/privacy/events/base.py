"""What a mechanism did, as data: the ledger stores events, and ε is a function of them.

The registry is closed: an event of a kind or version that this code does not know is an error,
never a guess. An event says nothing about the data; it holds only public parameters.
Conventions: a noise multiplier is σ/C, the standard deviation of the noise in units of the clip
norm, *effective* for one whole update (summed over shards and accumulation); a sampling rate is
the probability that one unit takes part in one update.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, ClassVar, Self

from dp_core.errors import BadInput
from dp_core.privacy.units import PrivacyUnit


class Relation(StrEnum):
    """Which data sets are neighbours."""

    ADD_REMOVE = "add-or-remove-one"  # one unit is added or removed
    ZERO_OUT = "zero-out-one"  # one unit's contribution is replaced by nothing; n is public
    REPLACE = "replace-one"  # one unit becomes any other; n is public


_REGISTRY: dict[tuple[str, int], type[MechanismEvent]] = {}


@dataclass(frozen=True)
class MechanismEvent:
    """Base of all events. `unit` is None where nobody stated it (a bare calculation)."""

    kind: ClassVar[str] = ""
    version: ClassVar[int] = 1
    unit: PrivacyUnit | None = field(default=None, kw_only=True)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.kind:
            _REGISTRY[cls.kind, cls.version] = cls

    @property
    def relation(self) -> Relation:
        """The neighbouring relation for which this event's ε holds."""
        return Relation.ADD_REMOVE

    def stating(self, unit: PrivacyUnit) -> Self:
        """Return the same event with its unit written into it and into all its parts."""
        return replace(self, unit=unit)

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
        cls = _REGISTRY.get((kind, version)) if named else None  # type: ignore[arg-type]
        if cls is None:
            raise BadInput(
                f"unknown event kind {kind!r} version {version!r}",
                where="privacy event",
                fix="Use the release of Confide that wrote it, or a newer one.",
            )
        body = {k: v for k, v in data.items() if k not in ("kind", "version")}
        expected = {f.name for f in fields(cls)}
        if set(body) != expected:
            wrong = ", ".join(sorted(set(body) ^ expected))
            raise BadInput(f"event {kind} has missing or unknown fields: {wrong}", where="event")
        try:
            if body["unit"] is not None:
                body["unit"] = PrivacyUnit(body["unit"])
            return cls._from_body(body)
        except (TypeError, ValueError) as error:
            raise BadInput(f"event {kind} holds values of the wrong type", where="event") from error

    @classmethod
    def _from_body(cls, body: dict[str, Any]) -> Self:
        return cls(**body)


def _plain(value: Any) -> Any:
    if isinstance(value, MechanismEvent):
        return value.to_json()
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value.value if isinstance(value, StrEnum) else value


def require(condition: bool, what: str, where: str) -> None:
    """Refuse an impossible value.

    Raises:
        BadInput: the condition does not hold.
    """
    if not condition:
        raise BadInput(what, where=where)
