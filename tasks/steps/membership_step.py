"""Run membership attacks on a model, with its training units and the held-out units."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from scipy import stats

from dp_core.audit.canaries import carries
from dp_core.audit.membership import (
    LOW_RATES,
    Attack,
    Floats,
    Losses,
    MembershipRow,
    RarityBucket,
    Scored,
    attacks,
    measure,
    profile_log_probabilities,
    rarity_buckets,
)
from dp_core.audit.membership_sample import LEVELS, Sample, draw_sample, levels_above
from dp_core.audit.observations import (
    Rows,
    attention_features,
    gradient_features,
    losses,
)
from dp_core.data.corpus import documents_of
from dp_core.data.hashing import digest64, seed_key
from dp_core.data.privacy_units import units_of
from dp_core.data.readers.mimic import Diagnoses
from dp_core.data.token_store import TokenStore
from dp_core.errors import BadInput
from dp_core.labels import Label, Operator, Public
from dp_core.models.hugging_face import load_model
from dp_core.models.parameters import AnyModel, language_model
from dp_core.privacy.accounting.tradeoff import PrivacyProfile
from dp_core.privacy.mechanisms import PrivacyUnit, compose
from dp_core.vocabulary import subwords
from tasks.context import StepArtifact, StepContext, StepOutput
from tasks.evidence.audits import PROBES, SUBJECT
from tasks.protocol import MembershipSpec, StepResult
from tasks.releases.declarations import open_for_operator, refuse_other_digests
from tasks.releases.provenance import (
    PRETRAINED,
    canaries_at,
    corpus_at,
    fact,
    model_at,
    models_by_updates,
    rows_at,
)
from tasks.report.job_results import MEMBERSHIP_FILE
from tasks.results import Input, as_releases, totals
from tasks.steps.canaries_step import read_canaries
from tasks.steps.token_store_step import TRAIN
from tasks.steps.training_inputs import held_out

LEAST_BUCKETS = 5  # rarity buckets needed to report whether rare units leak more


@dataclass(frozen=True)
class MembershipFinding:
    """The results of the attacks on one model.

    Attributes:
        updates: number of training updates after which the model was kept.
        losses: side -> mean loss of a row in nats, for `members` and `others`.
        rows: results of every attack at every level.
        rarity: results of the published attack by the rarity of a unit.
    """

    updates: int
    losses: dict[str, float] = field(default_factory=dict)
    rows: tuple[MembershipRow, ...] = ()
    rarity: tuple[RarityBucket, ...] = ()


def run(spec: MembershipSpec, context: StepContext) -> StepOutput:
    """Attack the model at every level; results from private rows have the label `operator`."""
    attacked = model_at(context, spec.model_uri, field="model_uri", steps=PRETRAINED)
    references = [
        model_at(context, uri, field="reference_uris", steps=PRETRAINED, vocabulary=attacked)
        for uri in spec.reference_uris
    ]
    store = rows_at(context, spec.private_store_uri, "private", attacked, field="private_store_uri")
    ceiling = claimed(attacked, store)
    for name, value in _ceilings(ceiling).items():
        context.measure(f"membership_ceiling/{name}", Public(value))
    opened = [open_for_operator(source, context) for source in spec.sources]
    diagnoses = Diagnoses(opened[0].path, where="membership_codes") if opened else None
    *earlier, last = _findings(spec, context, attacked, references, store, ceiling, diagnoses)
    for one in (*earlier, last):
        _tell(context, one)
    text = {
        "ceilings": _ceilings(ceiling),
        **asdict(last),
        "kept": [asdict(one) for one in earlier],
    }
    (context.out / MEMBERSHIP_FILE).write_text(json.dumps(text, indent=1))
    return StepOutput(
        outputs={"membership": MEMBERSHIP_FILE},
        facts={
            SUBJECT: fact(attacked, "weights_digest"),
            PROBES: fact(store, "canaries_digest"),
            **({"source_digests": [one.digest for one in opened]} if opened else {}),
        },
        artifacts=[StepArtifact(MEMBERSHIP_FILE, Label.OPERATOR)],
    )


def refuse_if_changed(spec: MembershipSpec, result: StepResult, context: StepContext) -> None:
    """Refuse a result if the table of diagnosis codes has changed since.

    Raises:
        BadInput: the table has changed.
    """
    now = [open_for_operator(source, context).digest for source in spec.sources]
    before = result.facts.get("source_digests", [])
    refuse_other_digests(spec, now, before, spec.data_version)


def claimed(attacked: Input, store: Input) -> PrivacyProfile | None:
    """Return the bound on any attack from the model's guarantee for one unit of the rows.

    Returns None if there is no claim for that unit: no total, another unit, or ε = ∞.
    """
    own = [r for r in attacked.result.releases if r.dataset == fact(store, "dataset")]
    if not own:
        return PrivacyProfile.of_claim(0.0, 0.0)  # no private text went into the model
    (total,) = totals(own)
    if total.epsilon is None or total.unit != fact(store, "unit") or not np.isfinite(total.epsilon):
        return None
    event = compose(*(release.event.stating(release.unit) for release in as_releases(own)))
    profile = PrivacyProfile.of_event(event)
    return PrivacyProfile((*profile.pairs, (total.epsilon, total.delta)))


def measured(
    sample: Sample, made: list[Attack], ceiling: PrivacyProfile | None
) -> list[MembershipRow]:
    """Return every attack's figures at every level that has enough groups."""
    above = levels_above(sample.unit)
    rows = []
    for level in LEVELS:
        for attack in made if level in sample.groups else ():
            found = sample.scored(level, attack)
            if found is None:
                continue
            scored, units = found
            group = ceiling.for_group(units) if ceiling and level in above else ceiling
            rows.append(measure(level, attack.name, scored, attack.threshold, group))
    return rows


def _findings(
    spec: MembershipSpec,
    context: StepContext,
    attacked: Input,
    references: list[Input],
    store: Input,
    ceiling: PrivacyProfile | None,
    diagnoses: Diagnoses | None,
) -> list[MembershipFinding]:
    """Return the results for every model that the training kept, with the final model last.

    All models are attacked with the same rows under the same masks, and have the ceiling of the
    whole training. The results are empty if no unit was held out.
    """
    models = models_by_updates(attacked)
    if (others := held_out(store)) is None:
        return [MembershipFinding(updates) for updates in models]
    train = TokenStore.open(store.folder / TRAIN)
    sample = _sample(spec, context, attacked, store, train, others, diagnoses)
    if not _can_be_attacked(sample):
        return [MembershipFinding(updates) for updates in models]
    sides = _sides(spec, sample, train, others)
    calibrating = [_losses(language_model(load_model(one.folder)), sides) for one in references]
    profiles: Sequence[frozenset[Hashable]] = sample.codes or [
        frozenset(side.store.tokens[row, : side.store.lengths[row]].tolist())
        for side in sides
        for row in side.numbers
    ]
    found = []
    for updates, folder in models.items():
        seen = _seen(language_model(load_model(folder)), sides, calibrating)
        made = attacks(seen.losses, calibrating, seen.features, sample.members, sample.fitted)
        means = {
            "members": float(seen.losses.mean[sample.members].mean()),
            "others": float(seen.losses.mean[~sample.members].mean()),
        }
        rows = tuple(measured(sample, made, ceiling))
        found.append(MembershipFinding(updates, means, rows, _by_rarity(sample, made, profiles)))
    return found


def _tell(context: StepContext, found: MembershipFinding) -> None:
    """Record the results of one model, for the operator."""
    for side, loss in found.losses.items():
        context.measure(f"membership/loss/{side}", Operator(loss), found.updates)
    for row in found.rows:
        name = f"membership/{row.level}/{row.attack}"
        context.measure(f"{name}/pl", Operator(row.leakage.value), found.updates)
        context.measure(f"{name}/auc", Operator(row.area.value), found.updates)
        for low in row.low_rates:
            context.measure(
                f"{name}/tpr_at_{low.asked:g}_fpr", Operator(low.tpr.value), found.updates
            )
    leaked = [bucket.leakage for bucket in found.rarity]
    if len(leaked) >= LEAST_BUCKETS and len(set(leaked)) > 1:
        correlation = stats.spearmanr([one.log_probability for one in found.rarity], leaked)
        context.measure(
            "membership/rarity_correlation", Operator(float(correlation.statistic)), found.updates
        )


def _by_rarity(
    sample: Sample, made: list[Attack], held_by_row: Sequence[frozenset[Hashable]]
) -> tuple[RarityBucket, ...]:
    """Return the published attack's results by the rarity of the units' codes or tokens.

    Units without any known code are left out: their diseases are unknown, not absent.
    """
    level = sample.unit.value
    for attack in made[:1]:
        if (found := sample.scored(level, attack)) is None:
            continue
        profiles = sample.profiles(level, attack, held_by_row)
        known = np.array([bool(profile) for profile in profiles])
        scored = Scored(*(a[known] for a in (found[0].scores, found[0].members, found[0].clusters)))
        logs = profile_log_probabilities([profile for profile in profiles if profile])
        return rarity_buckets(logs, scored, attack.threshold) if known.any() else ()
    return ()


def _sample(
    spec: MembershipSpec,
    context: StepContext,
    attacked: Input,
    store: Input,
    train: TokenStore,
    others: TokenStore,
    diagnoses: Diagnoses | None,
) -> Sample:
    corpus = corpus_at(context, spec.corpus_uri, "private")
    planted = canaries_at(context, spec.canaries_uri, attacked)
    for name, one, other in (
        ("canaries_digest", fact(store, "canaries_digest"), fact(planted, "digest")),
        ("dataset", fact(store, "dataset"), fact(corpus, "dataset")),
        ("unit", fact(store, "unit"), spec.units.unit),
        ("words_per_unit", fact(store, "example_words"), spec.units.example_words),
    ):
        if one != other:
            raise BadInput(f"its {name} is not that of the other inputs", where="private_store_uri")
    canaries, unit = read_canaries(planted.folder), PrivacyUnit(spec.units.unit)
    codes = None
    if diagnoses is not None:
        codes = diagnoses.of_patient if unit is PrivacyUnit.PATIENT else diagnoses.of_admission
    return draw_sample(
        units_of(documents_of(context.shards(corpus)), unit, spec.units.words_per_unit),
        unit=unit,
        train=train,
        held_out=others,
        tokenizer=subwords.load(attacked.folder),
        max_examples_per_unit=fact(store, "max_examples_per_unit"),
        carries=lambda unit_id: any(carries(c, unit_id, spec.seed) for c in canaries),
        most=spec.config.membership_units,
        key=seed_key(spec.seed),
        codes=codes,
    )


def _can_be_attacked(sample: Sample) -> bool:
    """Return whether the sample is large enough to fit attacks and to measure them."""
    return all(
        min((side & sample.fitted).sum(), (side & ~sample.fitted).sum()) >= 2
        for side in (sample.members, ~sample.members)
    )


def _sides(
    spec: MembershipSpec, sample: Sample, train: TokenStore, others: TokenStore
) -> tuple[Rows, Rows]:
    """Return the rows of members and of others, under masks that no training used."""
    coins, masks = digest64(seed_key(spec.seed), "membership masks"), spec.config.membership_masks
    return (
        Rows(train, sample.member_rows, coins, masks),
        Rows(others, sample.other_rows, coins, masks),
    )


def _losses(model: AnyModel, sides: tuple[Rows, Rows]) -> Losses:
    found = [losses(model, side) for side in sides]
    return Losses(
        np.concatenate([one.mean for one in found]),
        np.concatenate([one.lowest for one in found]),
    )


@dataclass(frozen=True)
class _Seen:
    """The attacker's view of one model: the losses of the rows, and their features by name."""

    losses: Losses
    features: dict[str, Floats]


def _seen(model: AnyModel, sides: tuple[Rows, Rows], calibrating: list[Losses]) -> _Seen:
    """Return the model's losses and features for all rows.

    Raises:
        BadInput: the model or a reference returns a value that is not finite.
    """
    features: dict[str, Floats] = {
        "attention": np.concatenate([attention_features(model, side) for side in sides]),
        "gradients": np.concatenate([gradient_features(model, side) for side in sides]),
    }
    features = {name: of_rows for name, of_rows in features.items() if of_rows.shape[1]}
    own = _losses(model, sides)
    every = [own.mean, own.lowest, *features.values(), *(one.mean for one in calibrating)]
    if not all(np.isfinite(values).all() for values in every):
        raise BadInput("the model answers with what is no number", where="model_uri")
    return _Seen(own, features)


def _ceilings(ceiling: PrivacyProfile | None) -> dict[str, float]:
    """Return the bounds that no attack on one unit can exceed; empty if there is no claim."""
    if ceiling is None:
        return {}
    tpr = {f"tpr_at_{rate:g}_fpr": ceiling.true_positive_rate(rate) for rate in LOW_RATES}
    return {"pl": ceiling.leakage, "auc": ceiling.area, **tpr}
