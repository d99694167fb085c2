"""The report's tables as plain data: page, terminal and JSON show the same rows."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from dp_core.audit.exposure import ALONE, EMBEDDED, IN_ROWS, ExposureRow, summarise
from dp_core.audit.extraction import (
    ALL,
    GREEDY,
    LEAST_CHANCE,
    SAMPLING,
    TOP_K,
    ExtractionRow,
)
from dp_core.audit.membership_metrics import LOW_RATES, MembershipRow, Share
from dp_core.labels import Label, Labelled
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.statement import DatasetTotal
from dp_core.training.bootstrap import MeanF1
from tasks.report.model import (
    ACCURACY,
    F1,
    EpochsRow,
    Exposures,
    Extraction,
    Fact,
    JobReport,
    LedgerView,
    Measure,
    Membership,
    ModelRow,
    Row,
    SweepRow,
    Value,
    Withheld,
    compared_by,
    measure_of,
)

WITHHELD_MARK = "▒▒"
NOT_MEASURED = "–"
NO_TOTAL = "no total"
WHY_NO_TOTAL = "unlike neighbours or units"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Cell:
    """One cell: how it reads, what it is, who may see it."""

    text: str
    value: float | str | None = None  # None: withheld or not measured
    label: Label | None = None  # None: a name, not a value
    withheld: bool = False
    alarm: bool = False  # beyond what chance explains
    detail: str = ""  # small print beneath, for example an interval


def name(text: str, detail: str = "") -> Cell:
    """Return the cell of a name: no label, since it measures nothing."""
    return Cell(text, value=text, detail=detail)


def withheld() -> Cell:
    """Return the discreet mark in place of an operator value."""
    return Cell(WITHHELD_MARK, label=Label.OPERATOR, withheld=True)


def number(value: float, label: Label, digits: int = 3) -> Cell:
    """Return a number in `digits` significant digits."""
    return Cell(significant(value, digits), value=value, label=label)


def total(epsilon: float | None) -> Cell:
    """Return a total ε, or that there is none: guarantees of unlike kinds do not add up."""
    if epsilon is None:
        return Cell(NO_TOTAL, detail=WHY_NO_TOTAL)
    return number(epsilon, Label.PUBLIC)


def measured(value: Value, *, percent: bool = False) -> Cell:
    """Return a measured number, or a share as a percentage without the sign: the header has it."""
    if value is None:
        return Cell(NOT_MEASURED)
    if isinstance(value, Withheld):
        return withheld()
    if percent:
        return Cell(f"{100 * value.value:.1f}", value=value.value, label=value.label)
    return number(value.value, value.label)


def percentage(value: Value) -> Cell:
    """Return a share within 0 … 1 as a percentage."""
    return measured(value, percent=True)


def bits(value: float, label: Label, *, alarm: bool = False, detail: str = "") -> Cell:
    """Return an exposure."""
    return Cell(f"{value:.1f}", value=value, label=label, alarm=alarm, detail=detail)


def significant(value: float, digits: int = 3) -> str:
    """Return a number as people write it: ∞, 0.0123, 1.1·10⁻⁶, 12 300."""
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -3:
        return power_of_ten(value, digits)
    if value == int(value) and exponent >= digits - 1:
        return f"{int(value):,}".replace(",", "\u202f")  # narrow no-break space
    rounded = f"{value:.{max(0, digits - 1 - exponent)}f}"
    return rounded.rstrip("0").rstrip(".") if "." in rounded else rounded


def power_of_ten(value: float, digits: int = 2) -> str:
    """Return a small number as mantissa and power: 1e-06 reads 10⁻⁶."""
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    power = "10" + str(int(exponent)).translate(_SUPERSCRIPTS)
    short = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return power if short == "1" else f"{short}·{power}"


_CONTEXT_WORDS = {
    ALONE: "shown alone",
    EMBEDDED: "among random tokens",
    IN_ROWS: "in the rows that trained",
}


@dataclass(frozen=True)
class Header:
    """A column's name, its unit, and whether it holds numbers (aligned right)."""

    name: str
    unit: str = ""
    numeric: bool = True


_MASKED = Header("MLM accuracy", "public text, %"), Header("MLM accuracy", "private text, %")
_CAUSAL = Header("Perplexity", "public text, by token"), Header("Perplexity", "private text")
_LEFT_TO_RIGHT = (
    "A causal model ranks the secret by what stands before it: as the next token after the hints."
)


@dataclass(frozen=True)
class Table:
    """Headers, rows of labelled cells as long as the headers, and notes beneath."""

    key: str
    caption: str
    headers: tuple[Header, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    lead: str = ""  # what a terminal says before it: a page has its own first line

    def __post_init__(self) -> None:
        if any(len(row) != len(self.headers) for row in self.rows):
            raise ValueError(f"table {self.key}: a row is not as long as the headers")

    def to_json(self) -> dict[str, Any]:
        """Return the table as JSON values; infinities as the string `inf`."""
        return {
            "key": self.key,
            "caption": self.caption,
            "columns": [{"name": h.name, "unit": h.unit} for h in self.headers],
            "rows": [[_cell_json(cell) for cell in row] for row in self.rows],
            "notes": list(self.notes),
            "lead": self.lead,
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Table:
        """Return the table that `to_json` wrote; only its first column holds names."""
        columns, rows = record["columns"], record["rows"]
        headers = (Header(c["name"], c["unit"], numeric=i > 0) for i, c in enumerate(columns))
        cells = (tuple(_cell_of_json(cell) for cell in row) for row in rows)
        return cls(
            record["key"],
            record["caption"],
            tuple(headers),
            tuple(cells),
            tuple(record["notes"]),
            record.get("lead", ""),  # reports of earlier versions have none
        )


def closing_of(report: JobReport) -> Table:
    """Return the closing table of an edition, led by what the audits leave of the claim."""
    table = closing_table(report.models, report.unit)
    audit = report.audit
    found = "" if audit is None else f"{audit.verdict}. {audit.finding}"
    lead = report.against or (found and f"Audit of the private training: {found}")
    return replace(table, lead=lead)


def closing_table(models: Sequence[ModelRow], unit: PrivacyUnit) -> Table:
    """Return what the job ends with: what each model costs, what it can do, what it remembers.

    Causal models show their perplexity where others show their accuracy under masks, and no score
    of a fine-tuning.
    """
    causal, measure = _are_causal(models), measure_of(models)
    cost_headers, cost_cells = _cost_columns(models, unit)
    rows = []
    for model in models:
        abilities = (
            map(measured, (model.perplexity_public, model.perplexity_private))
            if causal
            else map(percentage, (model.mlm_public, model.mlm_private, model.score))
        )
        rows.append(
            (
                name(model.name),
                number(model.epsilon_vocabulary, Label.PUBLIC),
                number(model.epsilon_training, Label.PUBLIC),
                *cost_cells(model),
                *abilities,
                *_exposure_cells(model.exposures),
            )
        )
    return Table(
        key="closing",
        caption="What each model costs in privacy, what it can do, and what it remembers",
        headers=(
            Header("Model", numeric=False),
            Header("ε_V", "vocabulary"),
            Header("ε_T", "training"),
            *cost_headers,
            *(_CAUSAL if causal else (*_MASKED, Header(measure.column, measure.unit))),
            Header("Exposure", "mean, bits"),
            Header("Exposure", "largest, bits"),
        ),
        rows=tuple(rows),
        notes=_exposure_notes([m.exposures for m in models if isinstance(m.exposures, Exposures)]),
    )


def _cost_columns(
    rows: Sequence[Row], unit: PrivacyUnit
) -> tuple[tuple[Header, ...], Callable[[Row], tuple[Cell, ...]]]:
    """Return the columns of the totals, and what fills them for a row.

    Each data set has columns of its own: no sum over data sets is anybody's guarantee.
    """
    tuned = any(row.pretrained.corpus.epsilon != row.cost.corpus.epsilon for row in rows)
    others = {
        total.dataset: "" if total.unit is None else f", per {total.unit}"
        for row in rows
        for total in row.cost.others
    }
    headers = [Header("ε", "before fine-tuning")] if tuned else []
    headers += [Header("ε", f"in total, per {unit}"), Header("δ", "in total")]
    for dataset, per in others.items():
        headers += [Header("ε", f"of “{dataset}”{per}"), Header("δ", f"of “{dataset}”")]

    def cells(row: Row) -> tuple[Cell, ...]:
        untouched = DatasetTotal("", None, 0.0, 0.0)
        known = {total.dataset: total for total in row.cost.others}
        shown = [row.cost.corpus, *(known.get(dataset, untouched) for dataset in others)]
        return (
            *((total(row.pretrained.corpus.epsilon),) if tuned else ()),
            *(cell for of_dataset in shown for cell in _total_cells(of_dataset)),
        )

    return tuple(headers), cells


def _total_cells(of_dataset: DatasetTotal) -> tuple[Cell, Cell]:
    finite = of_dataset.epsilon is not None and math.isfinite(of_dataset.epsilon)
    delta = number(of_dataset.delta, Label.PUBLIC, 2) if finite else Cell(NOT_MEASURED)
    return total(of_dataset.epsilon), delta


def _exposure_cells(exposures: Exposures | Withheld | None) -> tuple[Cell, Cell]:
    if exposures is None:
        return Cell(NOT_MEASURED), Cell(NOT_MEASURED)
    if isinstance(exposures, Withheld):
        return withheld(), withheld()
    summary = summarise(exposures.rows)
    mean_alarm = summary.remembers and summary.mean > summary.mean_null_high
    return (
        bits(summary.mean, exposures.label, alarm=mean_alarm),
        bits(summary.largest, exposures.label, alarm=summary.remembers),
    )


def _are_causal(models: Sequence[ModelRow]) -> bool:
    return any(model.perplexity_public is not None for model in models)


def _exposure_notes(shown: Sequence[Exposures]) -> tuple[str, ...]:
    if not shown:
        return ()
    summary = summarise(shown[0].rows)
    ceiling = math.log2(shown[0].rows[0].candidates)
    return (
        f"Exposure: a model that remembers nothing reads about 1 bit, and stays below "
        f"{summary.mean_null_high:.1f} (mean) and {summary.largest_null_high:.1f} (largest group) "
        f"in 97.5% of cases; a secret always ranked first reads {ceiling:.1f}.",
    )


def entity_table(models: Sequence[ModelRow]) -> Table:
    """Return F1 by entity type or class, then the score over all with its interval.

    There are no rows where nothing was measured.
    """
    measure = measure_of(models)
    types = sorted({kind for model in models for kind in model.f1_by_type})
    rows = [
        (name(kind), *(percentage(model.f1_by_type.get(kind)) for model in models))
        for kind in types
    ]
    if any(model.score is not None for model in models):
        rows.append((name(measure.over_all), *(percentage(model.score) for model in models)))
    if known := any(model.interval is not None for model in models):
        rows.append((name("95% interval"), *(_interval_cell(model.interval) for model in models)))
    return Table(
        key="entities",
        caption=measure.by_label,
        headers=(
            Header(measure.label, numeric=False),
            *(Header(model.name, "%" if measure is ACCURACY else "F1, %") for model in models),
        ),
        rows=tuple(rows),
        notes=(_OF_THE_INTERVAL,) if known else (),
    )


_OF_THE_INTERVAL = (
    "The interval is a bootstrap over the patients or documents of the test part: what another "
    "training would do is not in it."
)


def _interval_cell(interval: tuple[Labelled, Labelled] | Withheld | None) -> Cell:
    if interval is None:
        return Cell(NOT_MEASURED)
    if isinstance(interval, Withheld):
        return withheld()
    return _span_cell([end.value for end in interval], interval[0].label)


def _span_cell(ends: Sequence[float], label: Label, *, percent: bool = True) -> Cell:
    text = " – ".join(f"{100 * end:.1f}" if percent else significant(end) for end in ends)
    return Cell(text, value=text, label=label)


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
            *((_LEFT_TO_RIGHT,) if _are_causal(models) else ()),
        ),
    )


def _group_row(
    model: str, row: ExposureRow, label: Label, counted: Mapping[str, Value]
) -> tuple[Cell, ...]:
    band = f"{row.null_low:.1f} – {row.null_high:.1f}"
    verdict = "yes" if row.remembers else "no"
    return (
        name(model, _CONTEXT_WORDS.get(row.context, row.context)),
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
    return f"<{power_of_ten(1e-9)}" if probability < 1e-9 else _probability(probability)


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
        _share(row.leakage, row.leakage_ceiling, alarm=row.above),
        _share(row.area, row.area_ceiling),
        *(_share(low.tpr, most) for low, most in zip(row.low_rates, ceilings, strict=True)),
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
        return _share(row.leakage, row.leakage_ceiling, alarm=row.above)

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


_OF_ONE_TRAINING = (
    "These are models on the way of one training: its learning rate follows the whole of it, so "
    "that a training that ended after as many epochs would give another model."
)
_ONE_CHARGE = (
    "One charge covers all of them together: each has the ε of all, also the first, for whoever "
    "holds one could have the others too."
)


def by_epoch_table(rows: Sequence[EpochsRow], unit: PrivacyUnit, measure: Measure = F1) -> Table:
    """Return scores and exposures by epoch: Jagannatha et al. 2021, Table 5, in shape."""
    cost_headers, cost_cells = _cost_columns(rows, unit)
    epochs = sorted({one.epochs for row in rows for one in row.at})
    found = []
    for row in rows:
        at = {one.epochs: one for one in row.at}
        shown = [at.get(one) for one in epochs]
        scores = [percentage(one.score) if one else Cell(NOT_MEASURED) for one in shown]
        exposures = [_exposure_cells(one.exposures if one else None) for one in shown]
        figures = [
            (name(measure.column, measure.unit), scores),
            (name("Exposure", "mean, bits"), [mean for mean, _ in exposures]),
            (name("Exposure", "largest, bits"), [largest for _, largest in exposures]),
        ]
        found += [
            (name(row.name), figure, *cost_cells(row), *cells)
            for figure, cells in figures
            if any(cell.text != NOT_MEASURED for cell in cells)
        ]
    return Table(
        key="by_epoch",
        caption="Usefulness and memory, by epoch",
        headers=(
            Header("Model", numeric=False),
            Header("Figure", numeric=False),
            *cost_headers,
            *(Header(f"Epoch {one:g}") for one in epochs),
        ),
        rows=tuple(found),
        notes=(_ONE_CHARGE, _OF_ONE_TRAINING) if rows else (),
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
        _share(row.share, row.ceiling, alarm=alarm, label=label),
        _share(row.control_share, None, label=label),
        Cell(_probability(row.p_value), value=row.p_value, label=label, alarm=alarm),
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


def _share(
    share: Share, ceiling: float | None, *, alarm: bool = False, label: Label = Label.OPERATOR
) -> Cell:
    interval = f"{100 * share.low:.1f} – {100 * share.high:.1f}"
    return Cell(
        f"{100 * share.value:.1f}",
        value=share.value,
        label=label,
        alarm=alarm,
        detail=interval if ceiling is None else f"{interval}, ≤ {100 * ceiling:.1f}",
    )


def _probability(value: float) -> str:
    return f"{value:.2f}" if value >= 0.01 else significant(value, 1)


def ledger_table(ledger: LedgerView) -> Table:
    """Return the data set's releases, one a row."""
    rows = tuple(
        (
            name(line.entry, line.seed_hash and f"seed {line.seed_hash[:12]}"),
            name(line.release, line.mechanism),
            number(line.epsilon, Label.PUBLIC),
            Cell(NOT_MEASURED)
            if line.epsilon_rdp is None
            else number(line.epsilon_rdp, Label.PUBLIC),
            number(line.delta, Label.PUBLIC, 2),
            name(line.state),
        )
        for line in ledger.lines
    )
    return Table(
        key="ledger",
        caption=f"Releases of “{ledger.dataset}”, per {ledger.unit}",
        headers=(
            Header("Entry", numeric=False),
            Header("Release", "mechanism", numeric=False),
            Header("ε", "PLD, claimed"),
            Header("ε", "RDP, for comparison"),
            Header("δ"),
            Header("State", numeric=False),
        ),
        rows=rows,
    )


def facts_table(key: str, caption: str, facts: Sequence[Fact]) -> Table:
    """Return a list of facts, one a row."""
    return Table(
        key=key,
        caption=caption,
        headers=(Header("", numeric=False), Header("")),
        rows=tuple((name(fact.name, fact.note), _fact_cell(fact)) for fact in facts),
    )


def _fact_cell(fact: Fact) -> Cell:
    if isinstance(fact.value, Withheld):
        return withheld()
    if isinstance(fact.value, str):
        return Cell(fact.value, value=fact.value, label=fact.label)
    return number(fact.value, fact.label, 4)


FINETUNING_TITLES = {  # of a sweep's axes
    "finetune_noise_multiplier": "Fine-tuning σ",
    "finetune_batch_size": "Fine-tuning batch",
    "finetune_epochs": "Fine-tuning epochs",
    "finetune_learning_rate": "Fine-tuning rate",
}


def sweep_table(points: Sequence[SweepRow], unit: PrivacyUnit) -> Table:
    """Return the settings of a sweep in its own order, and behind them its baselines."""
    cost_headers, cost_cells = _cost_columns(points, unit)
    named = any(point.baseline for point in points)
    tuning = list(points[0].finetuning) if points else []
    measure, (spread_headers, spread_cells) = compared_by(points), _spread_columns(points)
    return Table(
        key="sweep",
        caption="Every setting of the sweep; each private training was a release of its own",
        headers=(
            *((Header("Model", numeric=False),) if named else ()),
            Header("Noise multiplier", "σ"),
            Header("Batch size", "expected units"),
            Header("Epochs"),
            *(Header(FINETUNING_TITLES[axis]) for axis in tuning),
            *((Header("ε_V", "vocabulary"),) if named else ()),
            Header("ε_T", f"training, per {unit}"),
            *cost_headers,
            Header(measure.column, measure.unit),
            *spread_headers,
            *(_MASKED if measure.is_share else _CAUSAL[:1]),
            Header("Exposure", "mean, bits"),
            Header("Exposure", "largest, bits"),
        ),
        rows=tuple(
            (
                *((name(_model_of(point)),) if named else ()),
                *_training_cells(point),
                *(number(point.finetuning[axis], Label.PUBLIC) for axis in tuning),
                *((number(point.epsilon_vocabulary, Label.PUBLIC),) if named else ()),
                number(point.epsilon_training, Label.PUBLIC),
                *cost_cells(point),
                measured(point.compared, percent=measure.is_share),
                *spread_cells(point),
                *(
                    map(percentage, (point.mlm_public, point.mlm_private))
                    if measure.is_share
                    else (measured(point.perplexity_public),)
                ),
                *_sweep_exposure_cells(point),
            )
            for point in points
        ),
        notes=(
            *_spread_notes(points),
            *_exposure_notes([e for p in points for e in _audits(p)]),
            *((_ONE_CHARGE, _OF_ONE_TRAINING) if any(p.training_epochs for p in points) else ()),
            *((_OF_BASELINES,) if named else ()),
            *((_OF_OTHER_TOKENS,) if named and not measure.is_share else ()),
        ),
    )


_OF_BASELINES = (
    "Models to compare with have no noise, and what anyone may see of them is charged nothing: "
    "public text only and checkpoints have a vocabulary of public text or their own (ε 0); "
    "“training” stands for one on the sweep's own vocabulary, which costs ε_V. What was trained "
    "without privacy, on exact private counts or the sweep's vocabulary, has no finite ε and "
    "stays with the operator. With another vocabulary there are other canaries."
)


_OF_OTHER_TOKENS = (
    "Perplexity is by token: on a vocabulary of its own (“public text only”, “without privacy”) it "
    "is of other tokens, and not to be compared with that on the sweep's."
)


def _model_of(point: SweepRow) -> str:
    return "with DP" if point.baseline is None else point.name.partition(" · ")[0]


def _training_cells(point: SweepRow) -> tuple[Cell, ...]:
    """Return what the training on private rows was told; a public model had none, and no σ."""
    told = point.noise_multiplier, point.batch_size, point.epochs
    *others, epochs = (
        number(value, Label.PUBLIC) if value else Cell(NOT_MEASURED) for value in told
    )
    whole = point.training_epochs
    return *others, replace(epochs, detail=f"of {significant(whole)} trained" if whole else "")


def _spread_columns(
    points: Sequence[SweepRow],
) -> tuple[tuple[Header, ...], Callable[[SweepRow], tuple[Cell, ...]]]:
    """Return the columns that say how sure a score is, where it was measured more than once.

    Deviations of shares are of points, as a percentage.
    """
    short, share = compared_by(points).short, compared_by(points).is_share
    known = [point.spread for point in points if point.spread is not None]
    seen = [spread for spread in known if isinstance(spread, MeanF1)]
    seeds = any(spread.seeds > 1 for spread in seen)
    folds = any(spread.folds > 1 for spread in seen)
    best = any(point.best_three is not None for point in points)
    headers = [Header(short, "95% interval")] if known else []
    headers += [Header(short, "SD over seeds")] if seeds else []
    headers += [Header(short, "SD over folds")] if folds else []
    headers += [Header(short, "three best seeds, %")] if best else []

    def cells(point: SweepRow) -> tuple[Cell, ...]:
        if not isinstance(point.spread, MeanF1) or not isinstance(point.compared, Labelled):
            return (withheld() if point.spread is not None else Cell(NOT_MEASURED),) * len(headers)
        kind, spread = type(point.compared), point.spread
        interval = Cell(NOT_MEASURED)
        if spread.interval is not None:
            interval = _span_cell(spread.interval, point.compared.label, percent=share)
        deviations = [
            measured(None if value is None else kind(value), percent=share)
            for value, shown in (
                (spread.seed_deviation, seeds),
                (spread.fold_deviation, folds),
            )
            if shown
        ]
        return (interval, *deviations, *((percentage(point.best_three),) if best else ()))

    return tuple(headers), cells


def _spread_notes(points: Sequence[SweepRow]) -> tuple[str, ...]:
    seen = [point.spread for point in points if isinstance(point.spread, MeanF1)]
    if not seen:
        return ()
    most = max(seen, key=lambda spread: spread.replicates)
    if not compared_by(points).is_share:
        return (
            "Perplexity is of text that no model trained on, less is better: the mean of up to "
            f"{most.seeds} trainings, each by a seed of its own, with Student's interval over "
            "them; what the trainings share (text, vocabulary, public pre-training) is not in it. "
            "ε in total is that of all trainings of a row.",
        )
    source = "of one fine-tuning"
    if most.replicates > 1:
        replicates = f"seeds: {most.seeds}, folds: {most.folds}"
        source = f"the mean of {most.replicates} fine-tunings ({replicates})"
    drawn = " and seeds" if most.seeds > 1 else ""
    told = (
        f"{measure_of(points).short} is {source}, its interval a bootstrap over test "
        f"documents{drawn}; what the trainings share (vocabulary, public pre-training) is not in "
        "it. ε in total is that of all trainings of a row.",
    )
    return (*told, _OF_THE_BEST) if any(point.best_three is not None for point in points) else told


_OF_THE_BEST = (
    "The mean of the three best seeds is what some papers report (Jagannatha et al. 2021): they "
    "are chosen by the test itself, so it is higher than what a training can be expected to give."
)


def _audits(point: SweepRow) -> tuple[Exposures, ...]:
    return point.exposures if isinstance(point.exposures, tuple) else ()


def _sweep_exposure_cells(point: SweepRow) -> tuple[Cell, Cell]:
    """Return the mean over the setting's trainings, and the largest of any of them."""
    if isinstance(point.exposures, Withheld):
        return withheld(), withheld()
    if not point.exposures:
        return Cell(NOT_MEASURED), Cell(NOT_MEASURED)
    label = point.exposures[0].label
    found = [summarise(one.rows) for one in point.exposures]
    mean = math.fsum(one.mean for one in found) / len(found)
    remembers = any(one.remembers for one in found)
    alarm = any(one.remembers and one.mean > one.mean_null_high for one in found)
    return (
        bits(mean, label, alarm=alarm),
        bits(max(one.largest for one in found), label, alarm=remembers),
    )


def _cell_json(cell: Cell) -> dict[str, Any]:
    infinite = isinstance(cell.value, float) and math.isinf(cell.value)
    more = {"label": cell.label, "withheld": cell.withheld, "detail": cell.detail}
    told = {name: value for name, value in more.items() if value}
    return {"text": cell.text, "value": str(cell.value) if infinite else cell.value, **told}


def _cell_of_json(record: dict[str, Any]) -> Cell:
    label = Label(record["label"]) if "label" in record else None
    return Cell(**(record | {"label": label}))


MARKS = {Label.DP: "ᵈ", Label.PUBLIC: "", Label.OPERATOR: "°"}
_STYLES = {Label.DP: "green", Label.PUBLIC: "", Label.OPERATOR: "yellow"}
LEGEND = "ᵈ dp: protected by the guarantee  ° operator: not protected  unmarked: public"


def rich_table(table: Table) -> RichTable:
    """Return the table for a wide terminal: the label is a mark and a colour, never colour alone.

    Text that does not fit is folded, not cut.
    """
    shown = _frame(table)
    for header in table.headers:
        shown.add_column(
            f"{header.name}\n{header.unit}" if header.unit else header.name,
            justify="right" if header.numeric else "left",
            overflow="fold",
        )
    for row in table.rows:
        shown.add_row(*(_text(cell) for cell in row))
    return shown


MODEL_NAME_WIDTH = 11  # characters of a line, so that four models fit


def side_by_side(table: Table) -> RichTable:
    """Return the table turned over, a column for each row: few models fit 80 columns so."""
    shown = _frame(table)
    shown.add_column(table.headers[0].name, overflow="fold")
    for row in table.rows:
        name = textwrap.fill(row[0].text, MODEL_NAME_WIDTH, break_on_hyphens=False)
        shown.add_column(name, justify="right", no_wrap=True)
    for column, header in enumerate(table.headers[1:], start=1):
        name = f"{header.name}, {header.unit}" if header.unit else header.name
        shown.add_row(name, *(_text(row[column]) for row in table.rows))
    return shown


def _frame(table: Table) -> RichTable:
    return RichTable(
        title=f"{table.lead}\n\n{table.caption}" if table.lead else table.caption,
        title_justify="left",
        caption="\n".join((LEGEND, *table.notes)),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )


def _text(cell: Cell) -> Text:
    if cell.label is None:
        return Text(cell.text)
    style = "bold red" if cell.alarm else _STYLES[cell.label]
    return Text(cell.text + MARKS[cell.label], style="dim" if cell.withheld else style)
