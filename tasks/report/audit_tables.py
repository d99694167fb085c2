"""What audits found, as tables: exposure, membership, extraction, and samples of text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dp_core.audit.exposure import ExposureRow
from dp_core.audit.extraction import ALL, GREEDY, LEAST_CHANCE, SAMPLING, TOP_K, ExtractionRow
from dp_core.audit.membership_metrics import LOW_RATES, MembershipRow
from dp_core.labels import Label
from tasks.report.cells import (
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
from tasks.report.model import Exposures, Extraction, Membership, ModelRow, Value
from tasks.report.tables import are_causal

_LEFT_TO_RIGHT = (
    "A causal model ranks the secret by what stands before it: as the next token after the hints."
)


def exposure_table(models: Sequence[ModelRow], counted: Mapping[str, Value]) -> Table:
    """Return every group of canaries of every model whose exposure may be shown.

    `counted`: how many units hold one, by “pattern at rate”.
    """
    shown = [
        (model.name, row, read.label)
        for model in models
        for read in (model.exposures, model.exposures_in_rows)
        if isinstance(read, Exposures)
        for row in read.rows
    ]
    rows = [_group_row(*one, counted) for one in shown]
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
            "Exposure is log₂|V| − log₂(mean rank of the secret). Rank exposure compares each "
            "canary with references that were never planted (Carlini et al. 2019); without memory "
            "every order of them is as likely. “Remembered” needs the whole interval to lie "
            "above the band of a model without memory.",
            *_rank_notes(row for _, row, _ in shown),
            *((_LEFT_TO_RIGHT,) if are_causal(models) else ()),
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
    """Return the exposure by rank among references, beside what chance gives."""
    null = row.rank_null
    beside = f"{null.low:.1f} – {null.high:.1f}; {_chance(row.rank_p_value)}"
    return bits(row.rank_exposure, label, detail=beside)


def _rank_notes(rows: Iterable[ExposureRow]) -> tuple[str, ...]:
    most = max((row.rank_exposure_ceiling for row in rows if row.references), default=None)
    return () if most is None else (f"Rank exposure is {most:.1f} bits at most.",)


def _chance(probability: float) -> str:
    return f"<{power_of_ten(1e-9)}" if probability < 1e-9 else probability_in_words(probability)


_ATTACKS = {  # names of `dp_core.audit.membership_attacks`, and how the literature calls them
    "loss": ("loss", "S-, A-, P-BBA: threshold at the mean training loss"),
    "min-k": ("Min-K%++", "the least likely fifth of the predictions"),
    "reference": ("reference", "loss against the public model's"),
    "rmia": ("RMIA", "offline, the public model as reference"),
    "lira": ("LiRA", "offline, the public model as reference"),
    "attention": ("attention", "S-AWBA: concentration by head, regression"),
    "gradients": ("gradients", "S-GWBA: norms by layer, regression"),
}


def membership_table(models: Sequence[ModelRow]) -> Table:
    """Return every attack on every model at every level, beside what the guarantee allows."""
    rows = [
        _attack_row(model.name, row)
        for model in models
        if isinstance(model.membership, Membership)
        for row in model.membership.rows
    ]
    return Table(
        key="membership",
        caption="Membership attacks: can those who trained be told from those held out?",
        headers=(
            Header("Model", numeric=False),
            Header("Attack", numeric=False),
            Header("Leakage", "TPR − FPR, %"),
            Header("AUC", "%"),
            *(Header("TPR", f"at {100 * rate:g}% FPR, %") for rate in LOW_RATES),
        ),
        rows=tuple(rows),
        notes=(
            "An attack that knows nothing has a leakage of 0, an AUC of 50%, and a TPR equal to "
            "its FPR. The public model never read private rows: what attacks find there is chance, "
            "or a difference between the sides. Below each figure its 95% interval (of twenty, one "
            "is expected to miss), and behind ≤ the most that the guarantee allows: of its units, "
            "and of groups of several by group privacy. An interval above it is marked, and "
            "refutes nothing, for members and held-out units were divided once.",
        ),
    )


def _attack_row(model: str, row: MembershipRow) -> tuple[Cell, ...]:
    attack, explained = _ATTACKS.get(row.attack, (row.attack, ""))
    ceilings = row.low_rate_ceilings or [None] * len(row.low_rates)
    return (
        name(model, f"by {row.level}: {row.members} against {row.others}"),
        name(attack, explained),
        share_cell(row.leakage, row.leakage_ceiling, alarm=row.above),
        share_cell(row.area, row.area_ceiling),
        *(share_cell(low.tpr, most) for low, most in zip(row.low_rates, ceilings, strict=True)),
    )


def _epochs_of(models: Sequence[ModelRow]) -> list[tuple[ModelRow, Membership]]:
    """Return the models that were attacked after several epochs."""
    attacked = [(model, model.membership) for model in models]
    return [(m, found) for m, found in attacked if isinstance(found, Membership) and found.by_epoch]


def _start_of(models: Sequence[ModelRow], model: ModelRow) -> Membership | None:
    """Return what was found of the model that a private training began with."""
    kinds = ("phrases", "public") if model.kind == "dp" else ("public",)
    found = {one.kind: one.membership for one in models}
    start = next((found[kind] for kind in kinds if kind in found), None)
    return start if isinstance(start, Membership) else None


def _epoch_headers(models: Sequence[ModelRow], unit: str) -> tuple[list[float], list[Header]]:
    shown = _epochs_of(models)
    epochs = sorted({one.epochs for _, found in shown for one in found.by_epoch})
    return epochs, [Header("Epoch 0", unit), *(Header(f"Epoch {e:g}", unit) for e in epochs)]


def loss_by_epoch_table(models: Sequence[ModelRow]) -> Table:
    """Return each model's loss on private text, held out, by epoch: Jagannatha et al., Table 3."""
    epochs, headers = _epoch_headers(models, "nats a prediction")

    def cell(losses: Mapping[str, float] | None) -> Cell:
        if not losses:
            return Cell(NOT_MEASURED)
        detail = f"{losses['members']:.3f} of what trained"
        loss = losses["others"]
        return Cell(f"{loss:.3f}", value=loss, label=Label.OPERATOR, detail=detail)

    rows = []
    for model, found in _epochs_of(models):
        start, by_epoch = _start_of(models, model), {one.epochs: one for one in found.by_epoch}
        losses = [by_epoch[e].losses if e in by_epoch else None for e in epochs]
        rows.append(
            (
                name(model.name),
                cell(start.losses if start else None),
                *(cell(one) for one in losses),
            )
        )
    return Table(
        key="loss_by_epoch",
        caption="Loss on private text that was held out, by epoch",
        headers=(Header("Model", numeric=False), *headers),
        rows=tuple(rows),
        notes=(
            "Mean over the rows that are attacked, under masks that no training drew; beneath it, "
            "of rows that trained. Epoch 0 is the model that the training began with. All epochs "
            "are of one training, on one course of its learning rate: a training that ended there "
            "would have another.",
        ),
    )


def leakage_by_epoch_table(models: Sequence[ModelRow]) -> Table:
    """Return PL of every attack at every level by epoch: Jagannatha et al., Fig. 1 and Table 2."""
    epochs, headers = _epoch_headers(models, "TPR − FPR, %")

    def cell(row: MembershipRow | None) -> Cell:
        if row is None:
            return Cell(NOT_MEASURED)
        return share_cell(row.leakage, row.leakage_ceiling, alarm=row.above)

    rows = []
    for model, found in _epochs_of(models):
        start = _start_of(models, model)
        every = [start.rows if start else (), *(one.rows for one in found.by_epoch)]
        columns = [{(row.level, row.attack): row for row in rows} for rows in every]
        places = [None, *(one.epochs for one in found.by_epoch)]
        for level, attack in dict.fromkeys(key for column in columns[1:] for key in column):
            cells = {
                place: cell(column.get((level, attack)))
                for place, column in zip(places, columns, strict=True)
            }
            shown = [cells.get(place, Cell(NOT_MEASURED)) for place in (None, *epochs)]
            attack_name, explained = _ATTACKS.get(attack, (attack, ""))
            rows.append((name(model.name, f"by {level}"), name(attack_name, explained), *shown))
    return Table(
        key="leakage_by_epoch",
        caption="Leakage of every attack, by epoch",
        headers=(Header("Model", numeric=False), Header("Attack", numeric=False), *headers),
        rows=tuple(rows),
        notes=(
            "Epoch 0 is the model that the training began with, which never read private rows: "
            "what is found there is chance, or a difference between the sides. Behind ≤ the most "
            "that the guarantee of the whole training allows, which covers the models of all its "
            "epochs together.",
        ),
    )


_WHAT = {"targeted": "secrets of planted canaries", "discoverable": "rows that trained"}
_CONTROL = {"targeted": "never planted", "discoverable": "held out"}


def extraction_table(models: Sequence[ModelRow]) -> Table:
    """Return what came out of each causal model by every protocol and decoding."""
    shown = [(model.name, one) for model in models for one in model.extractions]
    rows = [
        _extraction_row(model, one, row)
        for model, one in shown
        for row in one.rows
        if row.group == ALL
    ]
    return Table(
        key="extraction",
        caption="Extraction: can secrets and text be got out of the models?",
        headers=(
            Header("Model", numeric=False),
            Header("Decoding", numeric=False),
            Header("Came out", "of what trained, %"),
            Header("Control", "of what did not, %"),
            Header("Probability", "by chance"),
        ),
        rows=tuple(rows),
        notes=(*_protocol_notes([one for _, one in shown]), _EXTRACTION_NOTE) if rows else (),
    )


def samples_table(models: Sequence[ModelRow]) -> Table:
    """Return the texts that each causal model wrote, if it was asked to."""
    shown = [(model.name, model.samples) for model in models if model.samples is not None]
    prompt = next((f"“{samples.prompt}”" for _, samples in shown if samples.prompt), "")
    return Table(
        key="samples",
        caption="What the models write",
        headers=(
            Header("Model", numeric=False),
            Header("Text", prompt and f"behind {prompt}", numeric=False),
        ),
        rows=tuple(
            (name(model), Cell(text, value=text, label=samples.label))
            for model, samples in shown
            for text in samples.texts
        ),
        notes=(
            "Drawn token by token from the 40 likeliest, with public coins: as private as the "
            "model that wrote it.",
        )
        if shown
        else (),
    )


_EXTRACTION_NOTE = (
    "A model that guesses well gets some right without having seen them: so the same is tried on "
    "what did not train (of the public model, neither did), and “by chance” says how often as many "
    "would come out of what trained if they came out as easily (Fisher's exact test). One time in "
    "forty is marked. Below each share its 95% interval, and behind ≤ the most that the guarantee "
    "allows. Little that comes out is no proof: another prefix or decoding may get more."
)


def _extraction_row(model: str, protocol: Extraction, row: ExtractionRow) -> tuple[Cell, ...]:
    k, tries = (protocol.settings[f"extraction_{name}"] for name in ("top_k", "tries"))
    decodings = {
        GREEDY: ("greedy", "the first choice"),
        TOP_K: ("top-k", f"among the {k} likeliest"),
        SAMPLING: ("sampling", f"in {tries} tries, top {k}"),
    }
    tried = f"{row.tried} {_WHAT[protocol.protocol]}, {row.control_tried} "
    label, alarm = protocol.label, row.above_chance
    return (
        name(model, tried + _CONTROL[protocol.protocol]),
        name(*decodings[row.decoding]),
        share_cell(row.share, row.ceiling, alarm=alarm, label=label),
        share_cell(row.control_share, None, label=label),
        Cell(probability_in_words(row.p_value), value=row.p_value, label=label, alarm=alarm),
    )


def _protocol_notes(shown: Sequence[Extraction]) -> tuple[str, ...]:
    """Return what was done, of each protocol once: settings alone."""
    said: dict[str, None] = {}
    for one in shown:
        s = one.settings
        begun = {
            "targeted": "Secrets of canaries: the model is shown the hints before the secret, and "
            "draws among the tokens that a secret could be.",
            "discoverable": "Rows: the model is shown the first "
            f"{s['extraction_prefix']} tokens of a row, one row of a unit, and must go on with its "
            f"next {s['extraction_suffix']}, word for word (Carlini et al. 2023).",
        }[one.protocol]
        when = (
            "This was settled before the training."
            if one.fixed_before_training
            else "This was chosen after the training: read it as a search, not as a test."
        )
        sampled = (
            f"Sampling counts where {s['extraction_tries']} tries give it with a chance of "
            f"{LEAST_CHANCE:g} or more (Hayes et al. 2025)."
        )
        said[f"{begun} {sampled} {when}"] = None
    return tuple(said)
