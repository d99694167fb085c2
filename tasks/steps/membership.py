"""Try membership attacks on a model: units that it was trained on against units held out."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
from scipy import stats

from dp_core.audit.canaries import carries
from dp_core.audit.membership_attacks import Attack, attacks
from dp_core.audit.membership_metrics import (
    LOW_RATES,
    MembershipRow,
    RarityBucket,
    measure,
    profile_log_probabilities,
    rarity_buckets,
)
from dp_core.audit.membership_sample import LEVELS, Sample, draw_sample, levels_above
from dp_core.audit.membership_scores import (
    Floats,
    Losses,
    Rows,
    attention_features,
    gradient_features,
    losses,
)
from dp_core.data.corpus import documents_of
from dp_core.data.hashing import digest64, seed_key
from dp_core.data.privacy_units import units_of
from dp_core.data.token_store import TokenStore
from dp_core.errors import BadInput
from dp_core.labels import Label, Operator, Public
from dp_core.models.hugging_face import load_model
from dp_core.models.parameters import AnyModel, language_model
from dp_core.privacy.accounting import PrivacyProfile
from dp_core.privacy.mechanisms import PrivacyUnit, compose
from dp_core.vocabulary import subwords
from tasks.evidence.audits import PROBES, SUBJECT
from tasks.protocol import MembershipSpec
from tasks.releases.provenance import (
    PRETRAINED,
    canaries_at,
    corpus_at,
    fact,
    model_at,
    rows_at,
)
from tasks.releases.statements import as_releases, totals
from tasks.report.results import MEMBERSHIP_FILE
from tasks.runtime.context import Artifact, Input, StepContext, StepOutput
from tasks.steps.canaries import read_canaries
from tasks.steps.token_store import TRAIN
from tasks.steps.training_inputs import held_out

LEAST_BUCKETS = 5  # of rarity, to say whether rare units leak more


def run(spec: MembershipSpec, context: StepContext) -> StepOutput:
    """Attack the model at every level; what is read of private rows is the operator's."""
    attacked = model_at(context, spec.model_uri, field="model_uri", steps=PRETRAINED)
    references = [
        model_at(context, uri, field="reference_uris", steps=PRETRAINED, vocabulary=attacked)
        for uri in spec.reference_uris
    ]
    store = rows_at(context, spec.private_store_uri, "private", attacked, field="private_store_uri")
    ceiling = claimed(attacked, store)
    for name, value in _ceilings(ceiling).items():
        context.measure(f"membership_ceiling/{name}", Public(value))
    rows, rarity = _findings(spec, context, attacked, references, store, ceiling)
    _tell(context, rows, rarity)
    text = {
        "ceilings": _ceilings(ceiling),
        "rows": [asdict(row) for row in rows],
        "rarity": [asdict(bucket) for bucket in rarity],
    }
    (context.out / MEMBERSHIP_FILE).write_text(json.dumps(text, indent=1))
    return StepOutput(
        outputs={"membership": MEMBERSHIP_FILE},
        facts={
            SUBJECT: fact(attacked, "weights_digest"),
            PROBES: fact(store, "canaries_digest"),
        },
        artifacts=[Artifact(MEMBERSHIP_FILE, Label.OPERATOR)],
    )


def claimed(attacked: Input, store: Input) -> PrivacyProfile | None:
    """Return what the model's guarantee for one unit of the rows leaves to any attack.

    None where nothing is claimed for that unit: no total, another unit, or ε = ∞.
    """
    own = [r for r in attacked.result.releases if r.dataset == fact(store, "dataset")]
    if not own:
        return PrivacyProfile.of_claim(0.0, 0.0)  # no private text went into it
    (total,) = totals(own)
    if total.epsilon is None or total.unit != fact(store, "unit") or not np.isfinite(total.epsilon):
        return None
    event = compose(*(release.event.stating(release.unit) for release in as_releases(own)))
    profile = PrivacyProfile.of_event(event)
    return PrivacyProfile((*profile.pairs, (total.epsilon, total.delta)))


def measured(
    sample: Sample, made: list[Attack], ceiling: PrivacyProfile | None
) -> list[MembershipRow]:
    """Return every attack's figures at every level, where there are groups enough."""
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
) -> tuple[list[MembershipRow], tuple[RarityBucket, ...]]:
    """Return every figure, and those by rarity; none where no unit was held out."""
    if (others := held_out(store)) is None:
        return [], ()
    train = TokenStore.open(store.folder / TRAIN)
    sample = _sample(spec, context, attacked, store, train, others)
    made = _attacks(spec, sample, train, others, attacked, references)
    tokens = [
        frozenset(side.tokens[row, : side.lengths[row]].tolist())
        for side, numbers in ((train, sample.member_rows), (others, sample.other_rows))
        for row in numbers
    ]
    return measured(sample, made, ceiling), _by_rarity(sample, made, tokens)


def _tell(
    context: StepContext, rows: list[MembershipRow], rarity: tuple[RarityBucket, ...]
) -> None:
    """Record what was found, for the operator."""
    for row in rows:
        name = f"membership/{row.level}/{row.attack}"
        context.measure(f"{name}/pl", Operator(row.leakage.value))
        context.measure(f"{name}/auc", Operator(row.area.value))
        for low in row.low_rates:
            context.measure(f"{name}/tpr_at_{low.asked:g}_fpr", Operator(low.tpr.value))
    leaked = [bucket.leakage for bucket in rarity]
    if len(leaked) >= LEAST_BUCKETS and len(set(leaked)) > 1:
        found = stats.spearmanr([bucket.log_probability for bucket in rarity], leaked)
        context.measure("membership/rarity_correlation", Operator(float(found.statistic)))


def _by_rarity(
    sample: Sample, made: list[Attack], tokens: list[frozenset[int]]
) -> tuple[RarityBucket, ...]:
    """Return what the published attack finds of units by how rare their tokens are together."""
    level = sample.unit.value
    for attack in made[:1]:
        if (found := sample.scored(level, attack)) is not None:
            logs = profile_log_probabilities(sample.profiles(level, attack, tokens))
            return rarity_buckets(logs, found[0], attack.threshold)
    return ()


def _sample(
    spec: MembershipSpec,
    context: StepContext,
    attacked: Input,
    store: Input,
    train: TokenStore,
    others: TokenStore,
) -> Sample:
    corpus = corpus_at(context, spec.corpus_uri, "private")
    planted = canaries_at(context, spec.canaries_uri, attacked)
    for name, one, other in (
        ("canaries_digest", fact(store, "canaries_digest"), fact(planted, "digest")),
        ("dataset", fact(store, "dataset"), fact(corpus, "dataset")),
        ("unit", fact(store, "unit"), spec.units.unit),
    ):
        if one != other:
            raise BadInput(f"its {name} is not that of the other inputs", where="private_store_uri")
    canaries, unit = read_canaries(planted.folder), PrivacyUnit(spec.units.unit)
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
    )


def _attacks(
    spec: MembershipSpec,
    sample: Sample,
    train: TokenStore,
    others: TokenStore,
    attacked: Input,
    references: list[Input],
) -> list[Attack]:
    """Return all attacks; none where the sample is too small to fit and to measure."""
    for side in (sample.members, ~sample.members):
        if min((side & sample.fitted).sum(), (side & ~sample.fitted).sum()) < 2:
            return []
    coins, masks = digest64(seed_key(spec.seed), "membership masks"), spec.config.membership_masks
    sides = (
        Rows(train, sample.member_rows, coins, masks),
        Rows(others, sample.other_rows, coins, masks),
    )

    def seen(model: AnyModel) -> Losses:
        found = [losses(model, side) for side in sides]
        return Losses(
            np.concatenate([one.mean for one in found]),
            np.concatenate([one.lowest for one in found]),
        )

    model = language_model(load_model(attacked.folder))
    features: dict[str, Floats] = {
        "attention": np.concatenate([attention_features(model, side) for side in sides]),
        "gradients": np.concatenate([gradient_features(model, side) for side in sides]),
    }
    own = seen(model)
    calibrating = [seen(language_model(load_model(one.folder))) for one in references]
    every = [own.mean, own.lowest, *features.values(), *(one.mean for one in calibrating)]
    if not all(np.isfinite(values).all() for values in every):
        raise BadInput("the model answers with what is no number", where="model_uri")
    return attacks(own, calibrating, features, sample.members, sample.fitted)


def _ceilings(ceiling: PrivacyProfile | None) -> dict[str, float]:
    """Return what no attack on one unit can pass; nothing where nothing is claimed."""
    if ceiling is None:
        return {}
    tpr = {f"tpr_at_{rate:g}_fpr": ceiling.true_positive_rate(rate) for rate in LOW_RATES}
    return {"pl": ceiling.leakage, "auc": ceiling.area, **tpr}
