"""Samples for membership attacks: units of the training, and units that were held out.

Both sides are drawn from one corpus by a keyed hash of the unit's id. The held-out share was drawn
in the same way, so before training the sides differ only by chance. Rows come from the token stores
themselves, so that members are exactly the rows of the training. Units that carry canaries are left
out: only members carry them, so their random tokens would reveal membership.

Everything here is private: ids of documents, admissions and patients stay in memory.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from tokenizers import Tokenizer

from dp_core.audit import membership
from dp_core.audit.protocol import RELEASED, Audit, Finding, Level, NullDistribution
from dp_core.data.corpus import Document
from dp_core.data.hashing import coin, digest64, document_unit_id
from dp_core.data.privacy_units import Unit
from dp_core.data.token_store import TokenStore, rows_of_units
from dp_core.errors import BadInput
from dp_core.labels import Label
from dp_core.models.parameters import AnyModel
from dp_core.privacy.accounting.tradeoff import PrivacyProfile
from dp_core.privacy.mechanisms import PrivacyUnit

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

SAMPLE = "sample"  # a row
LEVELS = (SAMPLE, "example", "document", "admission", "patient")
FITTED_SHARE = 0.2  # share of the clusters of both sides on which attacks are fitted
LEAST_GROUPS = 10  # minimum number of groups on each side for a measurement
_NO_GROUP = -1


@dataclass(frozen=True)
class Sample:
    """Rows of members and of others, with the groups of each row.

    Attributes:
        unit: the protected unit of the model's guarantee.
        sides: the store of the training, and the store of held-out units, with the row numbers of
            the sample.
        members: (n,) whether each row is a member; members come first.
        groups: level -> (n,) number of the row's group, −1 where the source names none.
        units: (n,) number of the row's unit.
        units_in_group: level above the unit -> (n,) number of the group's units in the corpus.
        clusters: (n,) number of the patient or, where none is named, of the unit.
        fitted: (n,) whether the row's cluster fits the attacks.
        codes: codes of each row's patient or admission; None if no codes are given.
    """

    unit: PrivacyUnit
    sides: tuple[tuple[TokenStore, Ints], ...]
    members: Flags
    groups: dict[str, Ints]
    units: Ints
    units_in_group: dict[str, Ints]
    clusters: Ints
    fitted: Flags
    codes: tuple[frozenset[str], ...] | None = None

    def scored(self, level: str, attack: membership.Attack) -> tuple[membership.Scored, int] | None:
        """Return the attack's scores of all groups of a level, and the largest group's size.

        A group within one unit is entirely a member or not. A group of several units is used if all
        of them are on one side. Such groups are small, and held-out groups are smaller still, so
        the size of a group would reveal its side. Therefore the sample keeps as many members as
        others of each size.

        Returns:
            The scores, and the largest number of units in a group; None with fewer than ten groups
            on a side.
        """
        ids = self.groups[level]
        usable = (ids != _NO_GROUP) & attack.measured
        if level in self.units_in_group:
            usable &= self._whole(ids, self.units_in_group[level])
        _, first, place = np.unique(ids[usable], return_index=True, return_inverse=True)
        scored = membership.Scored(
            np.bincount(place, attack.scores[usable]) / np.bincount(place),
            self.members[usable][first],
            self.clusters[usable][first],
        )
        sizes = np.ones(len(first), np.int64)
        if level in self.units_in_group:
            sizes = self.units_in_group[level][usable][first]
            kept = _matched(scored.members, sizes)
            sizes = sizes[kept]
            scored = membership.Scored(
                scored.scores[kept], scored.members[kept], scored.clusters[kept]
            )
        if min(scored.members.sum(), (~scored.members).sum()) < LEAST_GROUPS:
            return None
        return scored, int(sizes.max())

    @property
    def can_be_attacked(self) -> bool:
        """Whether the sample is large enough to fit attacks and to measure them."""
        return all(
            min((side & self.fitted).sum(), (side & ~self.fitted).sum()) >= 2
            for side in (self.members, ~self.members)
        )

    def _whole(self, ids: Ints, in_corpus: Ints) -> Flags:
        """Return the rows of groups whose units are all in the sample, on one side."""
        of_units, _, sides = np.unique(np.stack([ids, self.units, self.members]), axis=1).tolist()
        there = Counter(zip(of_units, sides, strict=True))  # units of a group on a side
        rows = zip(ids.tolist(), self.members.tolist(), in_corpus.tolist(), strict=True)
        return np.array([there[group, side] == count for group, side, count in rows], np.bool_)


def _matched(members: Flags, sizes: Ints) -> Ints:
    """Return the places of the first members and others, equally many of each size."""
    kept: list[int] = []
    for size in np.unique(sizes):
        here = sizes == size
        inside, others = np.flatnonzero(here & members), np.flatnonzero(here & ~members)
        both = min(len(inside), len(others))
        kept += [*inside[:both].tolist(), *others[:both].tolist()]
    return np.array(sorted(kept), np.int64)


def levels_above(unit: PrivacyUnit) -> tuple[str, ...]:
    """Return the levels whose groups may hold several units."""
    return LEVELS[LEVELS.index(unit.value) + 1 :]


def draw_sample(
    units: Iterable[Unit],
    *,
    unit: PrivacyUnit,
    train: TokenStore,
    held_out: TokenStore,
    tokenizer: Tokenizer,
    max_examples_per_unit: int,
    carries: Callable[[str], bool],
    most: int,
    key: bytes,
    codes: Callable[[Document], frozenset[str]] | None = None,
) -> Sample:
    """Draw up to `most` units of each side, and look up their rows.

    Args:
        units: all units of the corpus from which both stores were cut.
        unit: the protected unit.
        train: rows of the training.
        held_out: rows of held-out units.
        tokenizer: the tokenizer of both stores.
        max_examples_per_unit: number of rows that were kept of a unit.
        carries: whether the unit with this id would carry a canary in training.
        most: largest number of units of each side.
        key: public coins of the stores.
        codes: codes of the diseases of a document's patient; empty without any.

    Raises:
        BadInput: the stores were cut from another corpus.
    """
    sides = (_Places(train, key), _Places(held_out, key))
    lowest: tuple[list[tuple[int, str, Unit]], list[tuple[int, str, Unit]]] = ([], [])
    in_corpus: dict[str, Counter[Hashable]] = {level: Counter() for level in levels_above(unit)}
    for candidate in units:
        for level, counts in in_corpus.items():
            counts[_group(level, candidate, candidate.documents[0])] += 1
        if carries(candidate.unit_id):
            continue
        for heap, places in zip(lowest, sides, strict=True):
            if places.of(candidate.unit_id) is not None:
                coin_of_unit = -digest64(key, "membership", candidate.unit_id)
                push = heapq.heappush if len(heap) < most else heapq.heappushpop
                push(heap, (coin_of_unit, candidate.unit_id, candidate))  # pops the largest hash
    numbers: list[Ints] = []  # of each side's rows
    origins: list[tuple[Unit, Document]] = []  # of all rows
    for heap, places in zip(lowest, sides, strict=True):
        cut = rows_of_units(
            [drawn for *_, drawn in sorted(heap, reverse=True)],
            tokenizer,
            sequence_length=places.store.sequence_length,
            max_examples_per_unit=max_examples_per_unit,
            key=key,
        )
        rows: list[int] = []
        for drawn, located in cut:
            rows += places.rows(drawn.unit_id, [row for _, row in located])
            origins += [(drawn, drawn.documents[text]) for text, _ in located]
        numbers.append(np.array(rows, np.int64))
    levels = [level for level in LEVELS[1:] if level != "example" or unit is PrivacyUnit.EXAMPLE]
    groups = {level: [_group(level, *origin) for origin in origins] for level in levels}
    clusters = [document.patient_id or of.unit_id for of, document in origins]
    fitted = [coin(key, "membership fit", cluster) < FITTED_SHARE for cluster in clusters]
    return Sample(
        unit=unit,
        sides=((train, numbers[0]), (held_out, numbers[1])),
        members=np.arange(len(origins)) < len(numbers[0]),
        groups={SAMPLE: np.arange(len(origins))}
        | {level: _numbered(of_rows) for level, of_rows in groups.items()},
        units=_numbered([of.unit_id for of, _ in origins]),
        units_in_group={
            level: np.array([counts[group] for group in groups[level]], np.int64)
            for level, counts in in_corpus.items()
        },
        clusters=_numbered(
            [
                (bool(document.patient_id), c)
                for (_, document), c in zip(origins, clusters, strict=True)
            ]
        ),
        fitted=np.array(fitted, np.bool_),
        codes=None if codes is None else tuple(codes(document) for _, document in origins),
    )


def _numbered(groups: Sequence[Hashable]) -> Ints:
    """Return a number for each group, by first appearance, and −1 for None."""
    numbers = {None: _NO_GROUP} | {
        group: n for n, group in enumerate(dict.fromkeys(groups)) if group is not None
    }
    return np.array([numbers[group] for group in groups], np.int64)


class _Places:
    """The row numbers of units in a store."""

    def __init__(self, store: TokenStore, key: bytes) -> None:
        self.store, self._key = store, key
        self._order = np.argsort(store.unit_keys)
        self._sorted = store.unit_keys[self._order]

    def of(self, unit_id: str) -> int | None:
        key = np.uint64(digest64(self._key, "unit", unit_id))
        place = int(np.searchsorted(self._sorted, key))
        there = place < len(self._sorted) and self._sorted[place] == key
        return int(self._order[place]) if there else None

    def rows(self, unit_id: str, expected: Sequence[Sequence[int]]) -> list[int]:
        """Return a unit's row numbers after checking that the rows match its text."""
        place = self.of(unit_id)
        assert place is not None  # noqa: S101 - only such units are drawn
        numbers = list(self.store.rows_of(place))
        stored = [self.store.tokens[n, : self.store.lengths[n]].tolist() for n in numbers]
        if stored != [list(row) for row in expected]:
            raise BadInput(
                "its rows differ from the corpus",
                where="private_store_uri, corpus_uri",
                fix="Give the corpus that the rows were cut from, and its seed.",
            )
        return numbers


def _group(level: str, unit: Unit, document: Document) -> Hashable:
    """Return the group of a unit's document at this level, or None if it has none."""
    match level:
        case "example":
            return unit.unit_id
        case "document":
            return document_unit_id(document.patient_id, document.document_id)
        case "patient":
            return document.patient_id or None
    return (document.patient_id, document.admission_id) if document.admission_id else None


# --- as findings

LEAST_BUCKETS = 5  # rarity buckets needed to report whether rare units leak more
_LEVELS: dict[str, Level] = {  # an admission is neither a document nor a patient
    "sample": "example",
    "example": "example",
    "document": "document",
    "admission": "group",
    "patient": "patient",
}


@dataclass(frozen=True)
class MembershipData:
    """Models to attack, with rows of members and of others.

    Attributes:
        models: number of training updates -> reads the model that was kept after them; the final
            model is the last one.
        references: read models that never saw the members.
        sample: the rows, with their groups; None if no unit was held out.
        masks: number of fresh masks over which losses are averaged.
        coins: public seed of the masks, which no training uses.
        claim: privacy profile of the rows' unit for the whole training; None without a claim.
    """

    models: Mapping[int, Callable[[], AnyModel]]
    references: Sequence[Callable[[], AnyModel]]
    sample: Sample | None
    masks: int
    coins: int
    claim: PrivacyProfile | None


def _attack_models(data: MembershipData) -> list[Finding]:
    """Attack every model that the training kept, with the same rows under the same masks.

    Raises:
        BadInput: a model returns a value that is not finite.
    """
    sample, ceilings = data.sample, _ceilings(data.claim)
    if sample is None or not sample.can_be_attacked:
        why = "No units were held out, or too few for an attack."
        return [MEMBERSHIP.not_run(why, Label.OPERATOR, public_metrics=ceilings)]
    from dp_core.audit.observations import Rows, features_of, losses_of  # imports TensorFlow

    sides = [Rows(*side, data.coins, data.masks) for side in sample.sides]
    references = [losses_of(read(), sides) for read in data.references]
    held_by_row: Sequence[frozenset[Hashable]] = sample.codes or [
        frozenset(side.store.tokens[row, : side.store.lengths[row]].tolist())
        for side in sides
        for row in side.numbers
    ]
    findings, last = [], list(data.models)[-1]
    for updates, read in data.models.items():
        model = read()
        losses, features = losses_of(model, sides), features_of(model, sides)
        made = membership.attacks(losses, references, features, sample.members, sample.fitted)
        first, *others = membership_findings(MEMBERSHIP, sample, made, data.claim)
        rarity = by_rarity(sample, made[0], held_by_row)
        means = {
            "members": float(losses.mean[sample.members].mean()),
            "others": float(losses.mean[~sample.members].mean()),
        }
        metrics = {f"membership/loss/{side}": loss for side, loss in means.items()}
        if (correlation := rarity_correlation(rarity)) is not None:
            metrics["membership/rarity_correlation"] = correlation
        figures = {"losses": means, "rarity": [asdict(bucket) for bucket in rarity]}
        subject = RELEASED if updates == last else f"the model after {updates} updates"
        of_model = {"updates": updates, "subject": subject}
        of_all = {
            "metrics": first.metrics | metrics,
            "public_metrics": ceilings,
            "details": first.details | figures,
        }
        findings.append(first.model_copy(update=of_model | of_all))
        findings += [each.model_copy(update=of_model) for each in others]
    return findings


def _ceilings(claim: PrivacyProfile | None) -> dict[str, float]:
    """Return the bounds that no attack on one unit can exceed; empty if there is no claim."""
    if claim is None:
        return {}
    tpr = {f"tpr_at_{rate:g}_fpr": claim.true_positive_rate(rate) for rate in membership.LOW_RATES}
    bounds = {"pl": claim.leakage, "auc": claim.area, **tpr}
    return {f"membership_ceiling/{name}": value for name, value in bounds.items()}


def membership_findings(
    audit: Audit, sample: Sample, made: Sequence[membership.Attack], ceiling: PrivacyProfile | None
) -> list[Finding]:
    """Return the finding of each level with enough groups.

    It states the attack with the largest leakage, each attack above a ceiling, and all figures. A
    single division of members and others cannot contradict a claim.
    """
    findings = []
    for level in sample.groups:
        rows = []
        for attack in made:
            if (scored := sample.scored(level, attack)) is not None:
                groups, units = scored
                above = level in levels_above(sample.unit)
                group = ceiling.for_group(units) if ceiling and above else ceiling
                rows.append(membership.measure(level, attack.name, groups, attack.threshold, group))
        if rows:
            findings.append(_finding_of_level(audit, rows))
    return findings or [audit.not_run("Too few units for a measurement.", Label.OPERATOR)]


def _finding_of_level(audit: Audit, rows: Sequence[membership.MembershipRow]) -> Finding:
    row = max(rows, key=lambda row: row.leakage.value)
    value, low, high = row.leakage.value, row.leakage.low, row.leakage.high
    above = [row.attack for row in rows if row.above]
    figures = {row.attack: _figures(row) for row in rows}
    return audit.finding(
        level=_LEVELS[row.level],
        value=value,
        interval=(low, high),
        confidence=membership.CONFIDENCE,
        ceiling=row.leakage_ceiling,
        ceiling_of="the claim's (e^ε − 1 + 2δ)/(e^ε + 1), over its whole profile"
        if row.leakage_ceiling
        else "",
        power=f"{row.members} members and {row.others} held out; an advantage above"
        f" {high - value:.3f} would exceed chance",
        null_control=NullDistribution(
            of="an attack without advantage, with the spread of these groups",
            low=low - value,
            high=high - value,
            alarm_rate=0.025,
        ),
        verdict="inconclusive" if above else "consistent",
        finding=f"The attack by {row.attack} has an advantage of {value:.3f}"
        + (f"; results above their ceilings need review: {', '.join(above)}." if above else "."),
        label=Label.OPERATOR,
        rows=tuple({"attack": attack, **values} for attack, values in figures.items()),
        metrics={
            f"{audit.key}/{row.level}/{attack}/{name}": value
            for attack, values in figures.items()
            for name, value in values.items()
        },
        details={"rows": [asdict(row) for row in rows]},
    )


def _figures(row: membership.MembershipRow) -> dict[str, float]:
    """Return the figures of an attack by their names in metrics."""
    tprs = {f"tpr_at_{rate.asked:g}_fpr": rate.tpr.value for rate in row.low_rates}
    return {"pl": row.leakage.value, "auc": row.area.value, **tprs}


def by_rarity(
    sample: Sample, attack: membership.Attack, held_by_row: Sequence[frozenset[Hashable]]
) -> tuple[membership.RarityBucket, ...]:
    """Return an attack's results by the rarity of the units' codes or tokens.

    Units without any known code are left out: their diseases are unknown, not absent.

    Args:
        sample: the rows.
        attack: the attack.
        held_by_row: n sets of tokens, or of codes of diseases.
    """
    level = sample.unit.value
    if (of_level := sample.scored(level, attack)) is None:
        return ()
    ids, held = sample.groups[level], dict[int, set[Hashable]]()
    for place in np.flatnonzero((ids != _NO_GROUP) & attack.measured):
        held.setdefault(int(ids[place]), set()).update(held_by_row[int(place)])
    profiles = [frozenset(held[group]) for group in sorted(held)]  # in the order of the scores
    known = np.array([bool(profile) for profile in profiles])
    scored = membership.Scored(
        *(a[known] for a in (of_level[0].scores, of_level[0].members, of_level[0].clusters))
    )
    logs = membership.profile_log_probabilities([profile for profile in profiles if profile])
    return membership.rarity_buckets(logs, scored, attack.threshold) if known.any() else ()


def rarity_correlation(rarity: Sequence[membership.RarityBucket]) -> float | None:
    """Return Spearman's correlation of log-probability and leakage; None with too few buckets."""
    leaked = [bucket.leakage for bucket in rarity]
    if len(leaked) < LEAST_BUCKETS or len(set(leaked)) == 1:
        return None
    return float(stats.spearmanr([bucket.log_probability for bucket in rarity], leaked).statistic)


MEMBERSHIP = Audit.registered("membership", _attack_models)
