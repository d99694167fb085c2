"""The privacy statement that goes with every exported model: words for people, JSON for tools."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dp_core.config.privacy import gives_a_unit_away
from dp_core.config.release import ReleaseRecord
from dp_core.privacy.accounting.accountants import epsilon_pld, epsilon_rdp
from dp_core.privacy.check_evidence import PROVEN, statement_words
from dp_core.privacy.mechanism_event import STATED
from dp_core.privacy.mechanisms import MechanismEvent, PrivacyUnit, compose

VERSION = 1


@dataclass(frozen=True)
class DatasetTotal:
    """The composed privacy guarantee of all releases under one budget.

    Attributes:
        datasets: names of their data sets, which share the budget.
        unit: the protected unit, or None if the releases have different units.
        epsilon: by PLD at δ; ∞ without a guarantee, None if the parts do not compose.
        delta: the sum of the releases' δ.
    """

    datasets: tuple[str, ...]
    unit: PrivacyUnit | None
    epsilon: float | None
    delta: float

    @property
    def dataset(self) -> str:
        """The names of its data sets in words."""
        return " and ".join(self.datasets)


@dataclass(frozen=True)
class PrivacyStatement:
    """The privacy claims of one model, as plain JSON data."""

    data: dict[str, Any]

    @property
    def words(self) -> str:
        """The statement in Markdown."""
        return statement_words(self.data)

    @property
    def epsilon(self) -> float | None:
        """Total ε; ∞ without a guarantee, None if the parts do not compose."""
        total = self.data["epsilon"]
        return math.inf if total == "inf" else total

    @property
    def paragraphs(self) -> list[str]:
        """The words as paragraphs, without titles and without Markdown's marks."""
        lines = self.words.replace("**", "").splitlines()
        text = [line for line in lines if line and not line.startswith("#")]
        return [f"• {line[2:]}" if line.startswith("- ") else line for line in text]


def privacy_statement(
    releases: Sequence[ReleaseRecord], *, made_up: bool = False, released_after: Sequence[int] = ()
) -> PrivacyStatement:
    """Return the statement of a model made from these releases.

    Each budget has a separate guarantee. The first claim is that of a use without guarantee, if
    there is one; the claims for further budgets are in the field `others`.

    The total of a budget is the PLD composition of its releases, at the sum of their δ, and holds
    if they were registered as one plan before the first. Releases with different units or neighbour
    relations have no total, since their guarantees do not compose.

    Args:
        releases: every release on the way to the model, the vocabulary's included.
        made_up: the private text was made up or public, so there is no one to protect.
        released_after: numbers of updates after which its pre-training released a model, including
            the last; empty if it released only the last model.
    """
    claims = [_claim(group, made_up) for group in by_budget(releases) or [[]]]
    claims.sort(key=lambda claim: claim["epsilon"] != "inf")
    data = dict(claims[0])
    if len(claims) > 1:
        for claim in claims:
            claim["assumptions"].append(STATED["separate"])
        data["others"] = claims[1:]
        data["private"] = all(claim["private"] for claim in claims)
        data["ledger_ids"] = [release.ledger_id for release in releases]
    if released_after:
        data["released_after_updates"] = list(released_after)
    return PrivacyStatement(data)


def _claim(releases: Sequence[ReleaseRecord], made_up: bool) -> dict[str, Any]:
    """Return the claim for the data sets of one budget."""
    (total,) = totals(releases) or (DatasetTotal((), None, 0.0, 0.0),)
    epsilon, delta = total.epsilon, total.delta
    events = [event_of(release) for release in releases]
    units = max((release.declared_units for release in releases), default=0)
    large = gives_a_unit_away(delta, units)
    private = epsilon is not None and math.isfinite(epsilon) and bool(releases) and not large
    return {
        "version": VERSION,
        "dataset": total.dataset or None,
        "unit": releases[0].unit if releases else None,
        "neighbours": events[0].relation.value if events else None,
        "epsilon": _json_number(epsilon),
        "delta": delta,
        "declared_units": units or None,
        "accounting": "PLD" if all(event.has_pld for event in events) else PROVEN,
        "private": private and not any(r.seed_known or r.of_study for r in releases),
        "seed_known": any(r.seed_known for r in releases),
        "made_up": made_up,
        "one_plan": _one_plan(releases),
        "releases": [_release_data(release) for release in releases],
        "assumptions": _rests_on(releases, events, epsilon),
        "ledger_ids": [release.ledger_id for release in releases],
    }


def event_of(release: ReleaseRecord) -> MechanismEvent:
    """Return the mechanism of a release."""
    return MechanismEvent.from_json(release.event)


def operator_only(releases: Sequence[ReleaseRecord]) -> bool:
    """Return whether descendants of these releases stay with the operator.

    The ε of a release is infinite, or its budget is a study's.
    """
    return any(r.for_operator_alone or event_of(r).is_unaccounted for r in releases)


def totals(releases: Sequence[ReleaseRecord]) -> tuple[DatasetTotal, ...]:
    """Return the composed guarantee of each budget, in the order of first appearance.

    Data sets with different budgets contain different people, so their ε are separate guarantees.
    Their sum applies to no person, and the largest would hide the others.
    """
    return tuple(map(_total, by_budget(releases)))


def by_budget(releases: Sequence[ReleaseRecord]) -> list[list[ReleaseRecord]]:
    """Return the releases under each budget, in the order of first appearance."""
    budgets = dict.fromkeys(release.budget for release in releases)
    return [[r for r in releases if r.budget == budget] for budget in budgets]


def _total(releases: Sequence[ReleaseRecord]) -> DatasetTotal:
    delta = math.fsum(release.delta for release in releases)
    held = [(PrivacyUnit(release.unit), event_of(release)) for release in releases]
    units = {(unit, event.example) for unit, event in held}
    epsilon = total_epsilon([event.stating(unit) for unit, event in held], delta)
    if any(event.unit not in (None, unit) for unit, event in held):
        epsilon = None
    unit = held[0][0] if len(units) == 1 else None
    return DatasetTotal(tuple(dict.fromkeys(r.dataset for r in releases)), unit, epsilon, delta)


def total_epsilon(events: Sequence[MechanismEvent], delta: float) -> float | None:
    """Return the ε of all releases together, by PLD at δ; 0 for none.

    It is None if they have different units (examples of different kinds are different units) or
    different neighbour relations, since such guarantees do not compose.
    """
    if not events:
        return 0.0
    if any(event.is_unaccounted for event in events):
        return math.inf
    if len({event.protects for event in events}) > 1:
        return None
    return epsilon_pld(compose(*events), delta)


def epsilons(event: MechanismEvent, delta: float) -> tuple[float, float | None]:
    """Return ε by PLD and by Rényi DP; ∞ and None without a guarantee, at every δ."""
    if event.is_unaccounted:
        return math.inf, None
    return epsilon_pld(event, delta), epsilon_rdp(event, delta)


def _release_data(release: ReleaseRecord) -> dict[str, Any]:
    event = event_of(release)
    by_pld, by_rdp = epsilons(event, release.delta)
    return {
        "ledger_id": release.ledger_id,
        "unit": release.unit,
        "mechanism": event.describe(),
        "event": event.to_json(),
        "epsilon": _json_number(by_pld),
        "epsilon_rdp": _json_number(by_rdp),
        "delta": release.delta,
    }


def _json_number(value: float | None) -> float | str | None:
    return "inf" if value is not None and math.isinf(value) else value


def _one_plan(releases: Sequence[ReleaseRecord]) -> bool:
    return len(releases) == 1 or (len({r.plan for r in releases}) == 1 and bool(releases[0].plan))


def _rests_on(
    releases: Sequence[ReleaseRecord], events: Sequence[MechanismEvent], epsilon: float | None
) -> list[str]:
    """Return the assumptions on which the guarantee rests, and its limits."""
    facts = dict.fromkeys(line for event in events for line in event.assumptions())
    if not facts:
        return []
    marked = dict.fromkeys(STATED[release.unit] for release in releases)
    said = [*marked, STATED["declared"], STATED["refusals"], *facts]
    if epsilon is not None and len(releases) > 1:
        said.append(STATED["planned" if _one_plan(releases) else "unplanned"])
    if not any(release.seed_known for release in releases):
        said.append(STATED["seed"])
    return [*said, STATED["finetuning"]]
