"""Tables of audit results: exposure, membership, extraction, and samples of text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from dp_core.audit.exposure import ExposureRow
from dp_core.audit.extraction import ALL, LEAST_CHANCE, ExtractionRow
from dp_core.audit.membership import LOW_RATES, MembershipRow
from dp_core.audit.protocol import Finding
from dp_core.labels import Label
from tasks.report.model import WORDS, Membership, ModelRow, Value
from tasks.report.tables import (
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
    notes = _rank_notes(row for _, row, _ in shown)
    if any(model.is_causal for model in models):
        notes = (*notes, WORDS["notes"]["left_to_right"])
    return Table.of("exposure", rows, notes=notes)


def _group_row(
    model: str, row: ExposureRow, label: Label, counted: Mapping[str, Value]
) -> tuple[Cell, ...]:
    band = f"{row.null_low:.1f} – {row.null_high:.1f}"
    verdict = "yes" if row.remembers else "no"
    return (
        name(model, WORDS["contexts"].get(row.context, row.context)),
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
    return () if ceiling is None else (WORDS["notes"]["rank"].format(ceiling=ceiling),)


def _chance(probability: float) -> str:
    return f"<{power_of_ten(1e-9)}" if probability < 1e-9 else probability_in_words(probability)


def membership_table(models: Sequence[ModelRow]) -> Table:
    """Return all attacks on all models at all levels, each with the maximum under the guarantee."""
    rows = [
        _attack_row(model.name, row)
        for model in models
        for membership in model.memberships[-1:]
        for row in membership.rows
    ]
    rates = (Header("TPR", f"at {100 * rate:g}% FPR, %") for rate in LOW_RATES)
    return Table.of("membership", rows, rates)


def _attack_name(attack: str) -> Cell:
    return name(*WORDS["attacks"].get(attack, (attack, "")))


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

    loss = Table.of("loss_by_epoch", losses, headers("nats a prediction"))
    return loss, Table.of("leakage_by_epoch", leakages, headers("TPR − FPR, %"))


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


def extraction_table(models: Sequence[ModelRow]) -> Table:
    """Return the share of texts extracted from each causal model, by protocol and decoding."""
    shown = [(model.name, extraction) for model in models for extraction in model.extractions]
    rows = [
        _extraction_row(model, extraction, row)
        for model, extraction in shown
        for row in (ExtractionRow(**figures) for figures in extraction.details["rows"])
        if row.group == ALL
    ]
    return Table.of("extraction", rows, notes=_protocol_notes([e for _, e in shown]))


def samples_table(models: Sequence[ModelRow]) -> Table:
    """Return the texts sampled from each causal model, if any were requested."""
    shown = [(model.name, model.samples) for model in models if model.samples is not None]
    prompt = next((f"“{samples.prompt}”" for _, samples in shown if samples.prompt), "")
    rows = (
        (name(model), Cell(text, value=text, label=samples.label))
        for model, samples in shown
        for text in samples.texts
    )
    return Table.of("samples", rows, [Header("Text", prompt and f"after {prompt}", numeric=False)])


def _extraction_row(model: str, protocol: Finding, row: ExtractionRow) -> tuple[Cell, ...]:
    words, settings = WORDS["extraction"], protocol.details["settings"]
    tested, control = words[protocol.key]["texts"], words[protocol.key]["control"]
    decoding = (word.format(**settings) for word in words["decodings"][row.decoding])
    label, alarm = protocol.label, row.above_chance
    return (
        name(model, f"{row.tried} {tested}, {row.control_tried} {control}"),
        name(*decoding),
        share_cell(row.share, row.ceiling, alarm=alarm, label=label),
        share_cell(row.control_share, None, label=label),
        Cell(probability_in_words(row.p_value), value=row.p_value, label=label, alarm=alarm),
    )


def _protocol_notes(shown: Sequence[Finding]) -> tuple[str, ...]:
    """Return one note for each protocol, from its settings alone."""
    notes: dict[str, None] = {}
    words = WORDS["notes"]
    for extraction in shown:
        settings = extraction.details["settings"]
        task = WORDS["extraction"][extraction.key]["task"].format(**settings)
        sampled = words["sampled"].format(chance=LEAST_CHANCE, **settings)
        fixed = "fixed_before" if extraction.details["fixed_before_training"] else "fixed_after"
        notes[f"{task} {sampled} {words[fixed]}"] = None
    return tuple(notes)
