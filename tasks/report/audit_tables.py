"""Tables of audit results: exposure, membership, extraction, and samples of text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from dp_core.audit.exposure import ExposureRow
from dp_core.audit.extraction import (
    ALL,
    DISCOVERABLE,
    GREEDY,
    LEAST_CHANCE,
    SAMPLING,
    TARGETED,
    TOP_K,
    ExtractionRow,
)
from dp_core.audit.membership import LOW_RATES, MembershipRow
from dp_core.audit.protocol import Finding
from dp_core.labels import Label
from tasks.report.model import Membership, ModelRow, Value
from tasks.report.tables import (
    CONTEXT_WORDS,
    NOT_MEASURED,
    Cell,
    Header,
    Table,
    bits,
    measured,
    name,
    power_of_ten,
    probability_in_words,
    share_cell,
    significant,
)

_LEFT_TO_RIGHT = (
    "A causal model ranks the secret as the next token after the hints, from the text before it."
)


def exposure_table(models: Sequence[ModelRow], counted: Mapping[str, Value]) -> Table:
    """Return the exposure of every group of canaries, for models whose exposure may be shown.

    Args:
        models: the models of the job.
        counted: mean number of units that contain a canary, by “pattern at rate”.
    """
    shown = [
        (model.name, row, exposures.label)
        for model in models
        for exposures in (*model.audits, model.exposures_in_rows)
        if exposures is not None
        for row in exposures.rows
    ]
    rows = [_group_row(model, row, label, counted) for model, row, label in shown]
    return Table(
        key="exposure",
        caption="Exposure of every group of canaries",
        headers=(
            Header("Model", numeric=False),
            Header("Pattern", "H hint, S secret", numeric=False),
            Header("Occurrences", "expected, units"),
            Header("Occurrences", "counted, units"),
            Header("Exposure", "bits, 95% interval"),
            Header("Without memory", "bits, 95% band"),
            Header("Probability", "by chance"),
            Header("Rank exposure", "bits; without memory; by chance"),
            Header("Remembered", numeric=False),
        ),
        rows=tuple(rows),
        notes=(
            *_rank_notes(row for _, row, _ in shown),
            *((_LEFT_TO_RIGHT,) if any(model.is_causal for model in models) else ()),
        ),
    )


def _group_row(
    model: str, row: ExposureRow, label: Label, counted: Mapping[str, Value]
) -> tuple[Cell, ...]:
    band = f"{row.null_low:.1f} – {row.null_high:.1f}"
    verdict = "yes" if row.remembers else "no"
    return (
        name(model, CONTEXT_WORDS.get(row.context, row.context)),
        name(row.pattern, f"{row.canaries} canaries"),
        Cell(
            significant(row.expected_occurrences),
            value=row.expected_occurrences,
            label=Label.PUBLIC,
            detail=f"p = {significant(row.canary_rate)}",
        ),
        measured(counted.get(f"{row.pattern} at {row.canary_rate:g}")),
        bits(row.exposure, label, alarm=row.remembers, detail=f"{row.low:.1f} – {row.high:.1f}"),
        Cell(f"{row.null_expected:.1f}", value=row.null_expected, label=Label.PUBLIC, detail=band),
        Cell(_chance(row.p_value), value=row.p_value, label=label),
        _rank_cell(row, label) if row.references else Cell(NOT_MEASURED),
        Cell(verdict, value=verdict, label=label, alarm=row.remembers),
    )


def _rank_cell(row: ExposureRow, label: Label) -> Cell:
    """Return the exposure by rank among references, with its band and probability by chance."""
    band = f"{row.rank_exposure_null_low:.1f} – {row.rank_exposure_null_high:.1f}"
    by_chance = f"{band}; {_chance(row.rank_exposure_p_value)}"
    return bits(row.rank_exposure, label, detail=by_chance)


def _rank_notes(rows: Iterable[ExposureRow]) -> tuple[str, ...]:
    ceiling = max((row.rank_exposure_ceiling for row in rows if row.references), default=None)
    return () if ceiling is None else (f"Rank exposure is at most {ceiling:.1f} bits.",)


def _chance(probability: float) -> str:
    return f"<{power_of_ten(1e-9)}" if probability < 1e-9 else probability_in_words(probability)


_ATTACKS = {  # title and terms of the literature, by names of `dp_core.audit.membership`
    "loss": ("loss", "S-, A-, P-BBA: threshold at the mean training loss"),
    "min-k": ("Min-K%++", "the least likely fifth of the predictions"),
    "reference": ("reference", "loss against the public model's"),
    "rmia": ("RMIA", "offline, the public model as reference"),
    "lira": ("LiRA", "offline, the public model as reference"),
    "attention": ("attention", "S-AWBA: concentration by head, regression"),
    "gradients": ("gradients", "S-GWBA: norms by layer, regression"),
}


def membership_table(models: Sequence[ModelRow]) -> Table:
    """Return all attacks on all models at all levels, each with the maximum under the guarantee."""
    rows = [
        _attack_row(model.name, row)
        for model in models
        for membership in model.memberships[-1:]
        for row in membership.rows
    ]
    return Table(
        key="membership",
        caption="Membership attacks: can training members be distinguished from held-out units?",
        headers=(
            Header("Model", numeric=False),
            Header("Attack", numeric=False),
            Header("Leakage", "TPR − FPR, %"),
            Header("AUC", "%"),
            *(Header("TPR", f"at {100 * rate:g}% FPR, %") for rate in LOW_RATES),
        ),
        rows=tuple(rows),
    )


def _attack_name(attack: str) -> Cell:
    return name(*_ATTACKS.get(attack, (attack, "")))


def _attack_row(model: str, row: MembershipRow) -> tuple[Cell, ...]:
    ceilings = row.low_rate_ceilings or [None] * len(row.low_rates)
    return (
        name(model, f"by {row.level}: {row.members} against {row.others}"),
        _attack_name(row.attack),
        _leakage_cell(row),
        share_cell(row.area, row.area_ceiling),
        *(share_cell(low.tpr, most) for low, most in zip(row.low_rates, ceilings, strict=True)),
    )


def epoch_tables(models: Sequence[ModelRow]) -> tuple[Table, Table]:
    """Return losses on private text and leakages by epoch, for models kept after several epochs.

    The tables have the form of Jagannatha et al. 2021: Table 3, and Fig. 1 with Table 2. Epoch 0
    is the model from which a private training started.
    """
    kept = [model for model in models if len(model.memberships) > 1]
    epochs = sorted({membership.epochs for model in kept for membership in model.memberships})
    attacks_on = {model.kind: (None, *model.memberships)[-1] for model in models}
    losses, leakages = [], []
    for model in kept:
        kinds = ("phrases", "public") if model.kind == "dp" else ("public",)
        start = next((attacks_on[kind] for kind in kinds if kind in attacks_on), None)
        by_epoch = {membership.epochs: membership for membership in model.memberships}
        columns = [start, *(by_epoch.get(epoch) for epoch in epochs)]
        losses.append((name(model.name), *map(_loss_cell, columns)))
        attacks = [
            {(row.level, row.attack): row for row in column.rows} if column else {}
            for column in columns
        ]
        for level, attack in dict.fromkeys(itertools.chain.from_iterable(attacks)):
            cells = (_leakage_cell(rows.get((level, attack))) for rows in attacks)
            leakages.append((name(model.name, f"by {level}"), _attack_name(attack), *cells))

    def headers(unit: str) -> list[Header]:
        return [Header(f"Epoch {epoch:g}", unit) for epoch in (0, *epochs)]

    loss = Table(
        key="loss_by_epoch",
        caption="Loss on held-out private text, by epoch",
        headers=(Header("Model", numeric=False), *headers("nats a prediction")),
        rows=tuple(losses),
    )
    leakage = Table(
        key="leakage_by_epoch",
        caption="Leakage of every attack, by epoch",
        headers=(
            Header("Model", numeric=False),
            Header("Attack", numeric=False),
            *headers("TPR − FPR, %"),
        ),
        rows=tuple(leakages),
    )
    return loss, leakage


def _leakage_cell(row: MembershipRow | None) -> Cell:
    if row is None:
        return Cell(NOT_MEASURED)
    return share_cell(row.leakage, row.leakage_ceiling, alarm=row.above)


def _loss_cell(membership: Membership | None) -> Cell:
    if membership is None or not membership.losses:
        return Cell(NOT_MEASURED)
    detail = f"{membership.losses['members']:.3f} on training rows"
    loss = membership.losses["others"]
    return Cell(f"{loss:.3f}", value=loss, label=Label.OPERATOR, detail=detail)


_SUBJECTS = {  # tested texts and control, by key of the protocol
    TARGETED.key: ("secrets of planted canaries", "never planted"),
    DISCOVERABLE.key: ("training rows", "held out"),
}


def extraction_table(models: Sequence[ModelRow]) -> Table:
    """Return the share of texts extracted from each causal model, by protocol and decoding."""
    shown = [(model.name, extraction) for model in models for extraction in model.extractions]
    rows = [
        _extraction_row(model, extraction, row)
        for model, extraction in shown
        for row in (ExtractionRow(**figures) for figures in extraction.details["rows"])
        if row.group == ALL
    ]
    return Table(
        key="extraction",
        caption="Extraction: can secrets and training text be extracted from the models?",
        headers=(
            Header("Model", numeric=False),
            Header("Decoding", numeric=False),
            Header("Extracted", "training text, %"),
            Header("Control", "text not trained on, %"),
            Header("Probability", "by chance"),
        ),
        rows=tuple(rows),
        notes=_protocol_notes([e for _, e in shown]),
    )


def samples_table(models: Sequence[ModelRow]) -> Table:
    """Return the texts sampled from each causal model, if any were requested."""
    shown = [(model.name, model.samples) for model in models if model.samples is not None]
    prompt = next((f"“{samples.prompt}”" for _, samples in shown if samples.prompt), "")
    return Table(
        key="samples",
        caption="Texts sampled from the models",
        headers=(
            Header("Model", numeric=False),
            Header("Text", prompt and f"after {prompt}", numeric=False),
        ),
        rows=tuple(
            (name(model), Cell(text, value=text, label=samples.label))
            for model, samples in shown
            for text in samples.texts
        ),
    )


def _extraction_row(model: str, protocol: Finding, row: ExtractionRow) -> tuple[Cell, ...]:
    settings = protocol.details["settings"]
    k, tries = settings["extraction_top_k"], settings["extraction_tries"]
    decodings = {
        GREEDY: ("greedy", "the first choice"),
        TOP_K: ("top-k", f"among the {k} likeliest"),
        SAMPLING: ("sampling", f"in {tries} tries, top {k}"),
    }
    tested, control = _SUBJECTS[protocol.key]
    label, alarm = protocol.label, row.above_chance
    return (
        name(model, f"{row.tried} {tested}, {row.control_tried} {control}"),
        name(*decodings[row.decoding]),
        share_cell(row.share, row.ceiling, alarm=alarm, label=label),
        share_cell(row.control_share, None, label=label),
        Cell(probability_in_words(row.p_value), value=row.p_value, label=label, alarm=alarm),
    )


def _protocol_notes(shown: Sequence[Finding]) -> tuple[str, ...]:
    """Return one note for each protocol, from its settings alone."""
    notes: dict[str, None] = {}
    for extraction in shown:
        s = extraction.details["settings"]
        task = {
            TARGETED.key: "Secrets of canaries: the model receives the hints before the secret, "
            "and chooses among all tokens that can be secrets.",
            DISCOVERABLE.key: "Rows: the model receives the first "
            f"{s['extraction_prefix']} tokens of a row, with one row per unit, and must reproduce "
            f"the next {s['extraction_suffix']} exactly (Carlini et al. 2023).",
        }[extraction.key]
        when = (
            "The protocol was fixed before the training."
            if extraction.details["fixed_before_training"]
            else "The protocol was chosen after the training, so its result is only exploratory."
        )
        sampled = (
            f"With sampling, a text counts as extracted if {s['extraction_tries']} tries produce "
            f"it with a probability of at least {LEAST_CHANCE:g} (Hayes et al. 2025)."
        )
        notes[f"{task} {sampled} {when}"] = None
    return tuple(notes)
