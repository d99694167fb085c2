"""What a report shows: plain frozen values with their labels; nothing of how they look.

Free text (notes, statements, facts' notes) is shown in every edition: keep figures out of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, TypeVar

from dp_core.audit.exposure import ExposureRow
from dp_core.audit.extraction import ExtractionRow
from dp_core.audit.membership_metrics import MembershipRow
from dp_core.audit.record import AuditRecord
from dp_core.labels import Label, Labelled
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.statement import DatasetTotal
from dp_core.training.bootstrap import MeanF1
from tasks.protocol.sweep import Baseline
from tasks.results.statements import Statement


class Edition(StrEnum):
    """Who a report is for: anyone, or those who may see values that no noise protects."""

    PUBLISHABLE = "publishable"
    OPERATOR = "operator"


@dataclass(frozen=True)
class Withheld:
    """An operator value that the publishable edition left out."""

    label = Label.OPERATOR


Value = Labelled | Withheld | None  # None: not measured


def measure_of(rows: Iterable[Row]) -> Measure:
    """Return what the rows' models are compared by."""
    return ACCURACY if any(row.accuracy is not None for row in rows) else F1


def compared_by(points: Iterable[SweepRow]) -> Measure:
    """Return what the settings of a sweep are compared by."""
    points = list(points)
    return PERPLEXITY if any(point.is_causal for point in points) else measure_of(points)


def number_of(value: Value) -> float | None:
    """Return the number, or None if it was not measured, is undefined or may not be seen."""
    if value is None or isinstance(value, Withheld) or math.isnan(value.value):
        return None
    return value.value


Kind = Literal["public", "phrases", "dp", "nonprivate"]


@dataclass(frozen=True)
class Measure:
    """What models are compared by, as tables and figures call it."""

    short: str
    column: str
    unit: str
    axis: str
    by_label: str = ""  # what the table of single labels shows
    label: str = ""  # what one of them is
    over_all: str = ""  # its last row
    explained: str = ""
    is_share: bool = True  # within 0 … 1, and more is better; of a perplexity, less is


F1 = Measure(
    "F1",
    "Entity F1",
    "strict, micro, %",
    "Strict entity F1",
    "Entity extraction: strict F1 by type",
    "Entity type",
    "all (micro)",
    "an entity counts when its type and both ends are right",
)
ACCURACY = Measure(
    "Accuracy",
    "Accuracy",
    "%",
    "Accuracy",
    "Classification: F1 by class, and accuracy",
    "Class",
    "accuracy",
    "F1 of each class, and the share of texts whose class is right",
)
PERPLEXITY = Measure(
    "Perplexity",
    "Perplexity",
    "private text, by token",
    "Perplexity of private text, less is better",
    is_share=False,
)


@dataclass(frozen=True)
class Exposures:
    """One model's exposure to all groups of canaries; the label is the model's own."""

    label: Label
    rows: tuple[ExposureRow, ...]


@dataclass(frozen=True)
class MembershipAt:
    """What membership attacks find of the model that a training had after some epochs."""

    epochs: float
    losses: Mapping[str, float]  # mean of a row in nats, of `members` and of `others`
    rows: tuple[MembershipRow, ...]


@dataclass(frozen=True)
class Membership:
    """Membership attacks on one model: always the operator's, for private rows were read."""

    rows: tuple[MembershipRow, ...]
    losses: Mapping[str, float] = field(default_factory=dict)  # as of `MembershipAt`
    by_epoch: tuple[MembershipAt, ...] = ()  # the last among them; empty: it alone was kept
    label = Label.OPERATOR


@dataclass(frozen=True)
class Extraction:
    """What came out of one causal model by one protocol."""

    protocol: Literal["discoverable", "targeted"]
    label: Label  # of rows that trained the operator's, of canaries the model's own
    rows: tuple[ExtractionRow, ...]
    settings: Mapping[str, int]  # of the protocol
    fixed_before_training: bool


@dataclass(frozen=True)
class Samples:
    """Texts that one causal model wrote; the label is the model's own."""

    label: Label
    prompt: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Cost:
    """What a model has cost by its whole ancestry: the private corpus, and other data sets."""

    corpus: DatasetTotal
    others: tuple[DatasetTotal, ...] = ()

    @property
    def infinite(self) -> bool:
        """Whether part of it had no guarantee at all."""
        return any(t.epsilon == math.inf for t in (self.corpus, *self.others))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One trained model. ε may be `math.inf`; accuracies and F1 are within 0 … 1.

    Its cost is that of everything that its figures cost: of the pre-trained model, and of the
    fine-tuned one that gives F1 or accuracy.
    """

    name: str
    epsilon_vocabulary: float
    epsilon_training: float  # 0 for a model that never read private rows
    cost: Cost
    untuned: Cost | None = None  # before fine-tuning, where that cost something
    f1: Value = None  # strict entity F1, micro
    accuracy: Value = None  # of classes, where the head is for them
    mlm_public: Value = None  # masked-token accuracy on held-out public text
    mlm_private: Value = None  # the same on held-out private units
    perplexity_public: Value = None  # of a causal model, by token, on the same texts
    perplexity_private: Value = None

    @property
    def score(self) -> Value:
        """What the fine-tuned model is worth: F1 or accuracy, as its head has it."""
        return self.f1 if self.accuracy is None else self.accuracy

    @property
    def pretrained(self) -> Cost:
        """What the model had cost before it was fine-tuned."""
        return self.untuned or self.cost


@dataclass(frozen=True, kw_only=True)
class ModelRow(Row):
    """One model of a job's comparison; several may be of kind `dp`, the job's own first."""

    kind: Kind
    tasks: str = ""  # what the names of its tasks begin with, if not with its kind
    f1_by_type: Mapping[str, Value] = field(default_factory=dict)  # of entities, or by class
    interval: tuple[Labelled, Labelled] | Withheld | None = None  # 95%, of the score
    exposures: Exposures | Withheld | None = None
    exposures_in_rows: Exposures | None = None  # the operator's
    membership: Membership | Withheld | None = None
    extractions: tuple[Extraction, ...] = ()
    samples: Samples | None = None


@dataclass(frozen=True)
class ModelAt:
    """What a training's model was worth after some epochs, and what it remembered."""

    epochs: float
    score: Value
    exposures: Exposures | Withheld | None


@dataclass(frozen=True, kw_only=True)
class EpochsRow(Row):
    """One training that left its models after several epochs: its score is the last one's.

    The cost is that of all of them together: none of them has a smaller one.
    """

    kind: Kind
    at: tuple[ModelAt, ...]  # the last among them


@dataclass(frozen=True, kw_only=True)
class SweepRow(Row):
    """One setting of a sweep: the mean over its seeds and folds, whose cost is that of all of them.

    ε_T is that of one private training; each seed of it was a release of its own. Baselines are
    what they are compared with: σ is 0, and of public ones batch and epochs too.
    """

    noise_multiplier: float
    batch_size: int
    epochs: float
    baseline: Baseline | None = None
    is_causal: bool = False
    training_epochs: float = 0.0  # to which its training went on; 0: it ended with this model
    updates: int = 0  # of one training on private rows, up to this model
    trainings: int = 1  # seeds of it
    finetuning: Mapping[str, float] = field(default_factory=dict)  # its settings that vary
    spread: MeanF1 | Withheld | None = None  # of what is compared
    best_three: Value = None  # mean of the three best seeds, of eight or more
    exposures: tuple[Exposures, ...] | Withheld = ()  # of each training

    @property
    def compared(self) -> Value:
        """What settings are compared by: the score, or a causal model's perplexity of private text.

        The latter is the operator's, as in a job.
        """
        return self.perplexity_private if self.is_causal else self.score


@dataclass(frozen=True)
class Curve:
    """One quantity of one model over its updates, with the ε spent so far where there is one."""

    model: str  # its name
    # nats a prediction | accuracy 0 … 1 | perplexity by token
    quantity: Literal["loss", "mlm_public", "perplexity_public", "perplexity_private"]
    label: Label
    updates: tuple[int, ...]
    values: tuple[float, ...]
    epsilon: tuple[float, ...] = ()  # empty, or one for each update: a function of settings


@dataclass(frozen=True)
class Fact:
    """One named fact for a list: a number or words, with its label and an explanation."""

    name: str
    value: float | int | str | Withheld
    label: Label
    note: str = ""


@dataclass(frozen=True)
class LedgerLine:
    """One release of private data as the ledger holds it."""

    entry: str
    release: str  # in words, for example `word histogram` or `DP pre-training`
    mechanism: str  # in words, parameters included
    epsilon: float  # PLD, at `delta`; by Rényi DP if no PLD is known
    epsilon_rdp: float | None
    delta: float
    state: str  # reserved | settled
    seed_hash: str = ""  # salted
    claimed_by_rdp: bool = False


@dataclass(frozen=True)
class LedgerView:
    """A data set's account: all that was ever released from it, and what is left."""

    dataset: str
    unit: PrivacyUnit
    lines: tuple[LedgerLine, ...]
    spent_epsilon: float | None  # None: nothing is added up, as no budget is kept
    spent_delta: float | None
    budget_epsilon: float | None = None  # None: made-up or public text has none
    budget_delta: float | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the report of a job and that of a sweep have in common."""

    title: str
    run_key: str
    shown_run: str  # the key of the run in the publishable edition
    created: str  # date and time, ISO 8601
    made_up: bool  # all private input is synthetic or public: nothing is withheld
    known_seed: bool  # a fixed privacy seed was used: nothing here is private
    private_dataset: str
    public_dataset: str
    entities_dataset: str
    unit: PrivacyUnit
    declared_units: int
    model_size: str  # in words, for example `BERT, 2 layers × 128`
    statement: Statement  # of a sweep: what releasing every point costs together
    ledger: LedgerView | None = None
    settings: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    public_seeds: Mapping[str, int] = field(default_factory=dict)
    repeat: tuple[str, ...] = ()  # shell commands
    notes: tuple[str, ...] = ()  # what a reader should know before believing the figures
    omissions: tuple[Fact, ...] = ()  # items that readers left out of the sources, by task


@dataclass(frozen=True, kw_only=True)
class JobReport(Report):
    """Everything the report of one job shows."""

    models: tuple[ModelRow, ...]
    audit: AuditRecord | None = None  # of the DP model's own training
    against: str = ""  # the gate's sentence on a model that an audit, of any run, contradicts
    # “pattern at rate” -> units that hold a canary of that group, mean: counted in the rows
    occurrences: Mapping[str, Value] = field(default_factory=dict)
    by_epoch: tuple[EpochsRow, ...] = ()  # of trainings that left several models
    curves: tuple[Curve, ...] = ()
    training: tuple[Fact, ...] = ()
    vocabulary: tuple[Fact, ...] = ()
    phrases: tuple[Fact, ...] = ()

    def model(self, kind: Kind) -> ModelRow | None:
        """Return the job's own model of that kind, if it trained one."""
        return next((row for row in self.models if row.kind == kind), None)


@dataclass(frozen=True, kw_only=True)
class SweepReport(Report):
    """Everything the report of a sweep shows."""

    points: tuple[SweepRow, ...]


R = TypeVar("R", JobReport, SweepReport)
T = TypeVar("T", ModelRow, EpochsRow, SweepRow)
Labels = frozenset[Label]
_DAY = len("2026-01-01")


def edition_of(report: R, edition: Edition) -> R:
    """Return the report as that edition may show it; synthetic or public data hides nothing."""
    hidden = _hidden(report, edition)
    if not hidden:
        return report
    if isinstance(report, SweepReport):
        rows: dict[str, Any] = {"points": tuple(_point(point, hidden) for point in report.points)}
    else:
        types = _types(report.models, hidden)
        audit = report.audit
        rows = {
            "audit": None if audit is None or audit.label in hidden else audit,
            "occurrences": {k: _value(v, hidden) for k, v in report.occurrences.items()},
            "models": tuple(_model(row, hidden, types) for row in report.models),
            "by_epoch": tuple(_epochs(row, hidden) for row in report.by_epoch),
            "curves": tuple(curve for curve in report.curves if curve.label not in hidden),
            "training": tuple(_fact(fact, hidden) for fact in report.training),
            "vocabulary": tuple(_fact(fact, hidden) for fact in report.vocabulary),
            "phrases": tuple(_fact(fact, hidden) for fact in report.phrases),
        }
    # Airflow's key of a run contains the second in which it began. Together with the second in
    # which it ended, it would reveal how large the data are.
    created = shown_day(report.created, report.settings)
    # An omission that is shown as withheld would reveal that there is one.
    rows["omissions"] = tuple(fact for fact in report.omissions if fact.label not in hidden)
    return replace(report, run_key=report.shown_run, created=created, **rows)


def shown_day(created: str, settings: Mapping[str, Any]) -> str:
    """Return the date of a report in its publishable edition.

    The report of a private selection has none: it is made after a secret number of trainings.
    """
    return "withheld" if settings.get("selection") == "random-count" else created[:_DAY]


def _hidden(report: Report, edition: Edition) -> Labels:
    if edition is Edition.OPERATOR or report.made_up:
        return frozenset()
    if report.known_seed:  # whoever knows it can subtract the noise: no `dp` label holds
        return frozenset({Label.OPERATOR, Label.DP})
    return frozenset({Label.OPERATOR})


def _value(value: Value, hidden: Labels) -> Value:
    return Withheld() if value is not None and value.label in hidden else value


def _types(rows: Iterable[ModelRow], hidden: Labels) -> frozenset[str]:
    """Return the entity types that may be named: which ones private labels have is private too."""
    return frozenset(
        kind
        for row in rows
        for kind, value in row.f1_by_type.items()
        if not isinstance(_value(value, hidden), Withheld)
    )


def _row(row: T, hidden: Labels) -> T:
    """Return the row without operator values, nor the cost of a fine-tuned model not shown.

    Fine-tuned without privacy, a model stays with the operator, and its score is withheld: what is
    left in the row is the pre-trained model's. What is measured on private text is withheld also
    where there was none to measure on.
    """
    score = _value(row.score, hidden)
    if row.untuned is not None and isinstance(score, Withheld) and row.cost.infinite:
        row = replace(row, cost=row.untuned, untuned=None)
    return replace(
        row,
        f1=_value(row.f1, hidden),
        accuracy=_value(row.accuracy, hidden),
        mlm_public=_value(row.mlm_public, hidden),
        mlm_private=Withheld(),
        perplexity_public=_value(row.perplexity_public, hidden),
        perplexity_private=Withheld(),
    )


def _point(row: SweepRow, hidden: Labels) -> SweepRow:
    shown = _row(row, hidden)
    measured = row.exposures if isinstance(row.exposures, tuple) else ()
    secret = any(one.label in hidden for one in measured)
    return replace(
        shown,
        spread=Withheld() if row.spread and isinstance(shown.compared, Withheld) else row.spread,
        best_three=_value(row.best_three, hidden),
        exposures=Withheld() if secret else row.exposures,
    )


def _epochs(row: EpochsRow, hidden: Labels) -> EpochsRow:
    at = [
        replace(
            one,
            score=_value(one.score, hidden),
            exposures=_shown_exposures(one.exposures, hidden),
        )
        for one in row.at
    ]
    return replace(_row(row, hidden), at=tuple(at))


def _shown_exposures(
    exposures: Exposures | Withheld | None, hidden: Labels
) -> Exposures | Withheld | None:
    return Withheld() if exposures is not None and exposures.label in hidden else exposures


def _model(row: ModelRow, hidden: Labels, types: frozenset[str]) -> ModelRow:
    membership, shown = row.membership, _row(row, hidden)
    return replace(
        shown,
        interval=Withheld() if row.interval and isinstance(shown.score, Withheld) else row.interval,
        f1_by_type={k: _value(v, hidden) for k, v in row.f1_by_type.items() if k in types},
        exposures=_shown_exposures(row.exposures, hidden),
        exposures_in_rows=None,
        membership=None if membership is None else Withheld(),
        extractions=tuple(one for one in row.extractions if one.label not in hidden),
        samples=None if row.samples is None or row.samples.label in hidden else row.samples,
    )


def _fact(fact: Fact, hidden: Labels) -> Fact:
    return replace(fact, value=Withheld()) if fact.label in hidden else fact
