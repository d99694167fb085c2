"""Data model of reports: frozen values with their labels, without any layout.

Every edition shows free text (notes, statements, notes of facts), which must not contain figures.
"""

from __future__ import annotations

import math
import shlex
import tomllib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dp_core.audit.exposure import ExposureRow
from dp_core.audit.membership import MembershipRow, RarityBucket
from dp_core.audit.protocol import AuditRecord, Finding
from dp_core.labels import Label, Labelled
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.statement import DatasetTotal, PrivacyStatement
from dp_core.training.bootstrap import MeanF1
from tasks.protocol.points import Baseline, Mode
from tasks.protocol.sweep import SweepSettings

if TYPE_CHECKING:
    from tasks.report.tables import Table

TEMPLATES = Path(__file__).parent / "templates"
# The words of tables and sentences, by key.
WORDS: dict[str, Any] = tomllib.loads((TEMPLATES / "words.toml").read_text(encoding="utf-8"))


class Edition(StrEnum):
    """The readers of a report: anyone, or only operators, who may see unprotected values."""

    PUBLISHABLE = "publishable"
    OPERATOR = "operator"


@dataclass(frozen=True)
class Withheld:
    """An operator value that the publishable edition left out."""

    label = Label.OPERATOR


Value = Labelled | Withheld | None  # None: not measured


def measure_of(rows: Sequence[ModelRow]) -> Measure:
    """Return the measure by which the models of the rows are compared.

    Models that were not fine-tuned are compared by the prediction of held-out private text, on its
    development part if there is one.
    """
    causal = any(row.is_causal for row in rows)
    for measure in () if causal else (ACCURACY, F1):
        if any(measure.of(row) is not None for row in rows):
            return measure
    measure = PERPLEXITY if causal else MASKED
    divided = any(row.development is not None for row in rows)
    return measure.on_development_part if divided else measure


def number_of(value: Value) -> float | None:
    """Return the number, or None if it was not measured, is undefined or is withheld."""
    if value is None or isinstance(value, Withheld) or math.isnan(value.value):
        return None
    return value.value


@dataclass(frozen=True)
class Measure:
    """A measure by which models are compared, with its titles in tables and figures."""

    field: str  # of a row
    short: str
    column: str
    unit: str
    axis: str
    by_label: str = ""  # caption of the table of scores by label
    label: str = ""  # header of its first column
    over_all: str = ""  # name of its last row
    is_share: bool = True  # within 0 … 1 and better if larger; False for a perplexity
    by_token: bool = False  # so that models with different tokens cannot be compared

    def of(self, row: ModelRow) -> Value:
        """Return the row's value of this measure."""
        value: Value = getattr(row, self.field)
        return value

    @property
    def title(self) -> str:
        """The column's name and unit in one line."""
        return f"{self.column}, {self.unit}"

    @property
    def on_development_part(self) -> Measure:
        """The same measure of the development part of the held-out private text."""
        unit, axis = (
            words.replace("private text", "private text (development part)")
            for words in (self.unit, self.axis)
        )
        return replace(self, field="development", unit=unit, axis=axis)


F1, ACCURACY, PERPLEXITY, MASKED = (Measure(**words) for words in WORDS["measures"].values())


@dataclass(frozen=True)
class Exposures:
    """One model's exposure to all groups of canaries, with the label of the model."""

    label: Label
    rows: tuple[ExposureRow, ...]


@dataclass(frozen=True)
class Membership:
    """Membership attacks on the model after some epochs; for the operator, as they read rows."""

    rows: tuple[MembershipRow, ...]
    losses: Mapping[str, float] = field(default_factory=dict)  # mean of a row, nats, by group
    epochs: float = math.inf  # infinite if the training saved no earlier model
    rarity: tuple[RarityBucket, ...] = ()  # of the attack by loss
    label = Label.OPERATOR


@dataclass(frozen=True)
class Samples:
    """Texts sampled from one causal model, with the label of the model."""

    label: Label
    prompt: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Cost:
    """The privacy cost of a model with all its ancestors, by budget; the corpus's comes first."""

    corpus: DatasetTotal
    others: tuple[DatasetTotal, ...] = ()

    def other(self, datasets: Set[str]) -> DatasetTotal:
        """Return the total of another budget of these data sets; 0 if the model read none."""
        untouched = DatasetTotal((), None, 0.0, 0.0)
        return next((t for t in self.others if not datasets.isdisjoint(t.datasets)), untouched)

    @property
    def infinite(self) -> bool:
        """Whether the model was trained on some data set without a guarantee."""
        return any(t.epsilon == math.inf for t in (self.corpus, *self.others))


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """One model of a job, or one setting of a sweep over its seeds and folds.

    If several models of a job have kind `dp`, the main model is the first. Figures of a setting
    are means over its replicates, and its cost is the total of all of them; ε_T is the cost of one
    private training. σ, batch size and epochs are 0 for models without such a training. ε may be
    `math.inf`; accuracies and F1 are within 0 … 1.

    The cost includes all figures of the row: the pre-trained model and the fine-tuned model that
    gives F1 or accuracy. In a table by epoch, it includes all models that the training saved.
    """

    name: str
    kind: Mode = "dp"
    epsilon_vocabulary: float
    epsilon_training: float  # 0 for a model that never read private rows
    cost: Cost
    pretrained: Cost  # before fine-tuning
    f1: Value = None  # strict entity F1, micro
    accuracy: Value = None  # for classification heads
    mlm_public: Value = None  # masked-token accuracy on held-out public text
    mlm_private: Value = None  # masked-token accuracy on held-out private units
    perplexity_public: Value = None  # for causal models, by token, on the same texts
    perplexity_private: Value = None
    development: Value = None  # the same on the development part, which the others then omit
    noise_multiplier: float = 0.0
    batch_size: int = 0
    epochs: float = 0.0
    baseline: Baseline | None = None
    is_causal: bool = False
    training_epochs: float = 0.0  # of the whole training; 0 if it ended with this model
    updates: int = 0  # of one training on private rows, up to this model
    finetuning: Mapping[str, float] = field(default_factory=dict)  # settings that vary
    spread: MeanF1 | Withheld | None = None  # of the compared measure
    best_three: Value = None  # mean of the three best seeds; needs at least eight seeds
    f1_by_type: Mapping[str, Value] = field(default_factory=dict)  # by entity type or class
    interval: tuple[Value, Value] | None = None  # 95% interval of the score
    exposures: tuple[Exposures, ...] | Withheld = ()  # of each training
    exposures_in_rows: Exposures | None = None  # for the operator only
    memberships: tuple[Membership, ...] = ()  # by epoch; the last is that of the row's model
    extractions: tuple[Finding, ...] = ()  # on causal models, by protocol
    samples: Samples | None = None

    @property
    def score(self) -> Value:
        """The score of the fine-tuned model: F1 or accuracy, depending on its head."""
        return self.f1 if self.accuracy is None else self.accuracy

    @property
    def scores(self) -> dict[str, Value]:
        """The scores of the model by metric: perplexities or masked accuracies, F1, accuracy."""
        scores = {"f1": self.f1, "accuracy": self.accuracy}
        measure = "mlm_accuracy" if self.perplexity_public is None else "perplexity"
        if self.development is not None:
            scores[f"{measure}_development"] = self.development
        if self.perplexity_public is None:
            masked = {"public": self.mlm_public, "private": self.mlm_private}
            return scores | {f"mlm_accuracy_{text}": value for text, value in masked.items()}
        perplexity = {"public": self.perplexity_public, "private": self.perplexity_private}
        return scores | {f"perplexity_{text}": value for text, value in perplexity.items()}

    @property
    def audits(self) -> tuple[Exposures, ...]:
        """The exposures of each training, or none if they are withheld."""
        return self.exposures if isinstance(self.exposures, tuple) else ()


QUANTITIES: dict[str, str] = WORDS["quantities"]  # of curves, by metric


@dataclass(frozen=True)
class Curve:
    """One quantity of one model over its updates, with the ε spent so far for private trainings."""

    model: str  # name of the model
    quantity: str  # a key of `QUANTITIES`
    label: Label
    updates: tuple[int, ...]
    values: tuple[float, ...]
    epsilon: tuple[float, ...] = ()  # empty, or one per update; depends on settings alone


@dataclass(frozen=True)
class Fact:
    """A named number or text with its label and an explanation."""

    name: str
    value: float | int | str
    label: Label
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The content of the report of a job or a sweep."""

    title: str
    run_key: str
    shown_run: str  # name of the run in the publishable edition
    created: str  # date and time, ISO 8601
    made_up: bool  # all private input is synthetic or public, so nothing is withheld
    known_seed: bool  # the privacy seed is known, so no release is protected
    private_dataset: str
    public_dataset: str
    entities_dataset: str
    unit: PrivacyUnit
    model_size: str  # in words, for example `BERT, 2 layers × 128`
    statement: PrivacyStatement  # of a sweep: for all points together
    ledger: Table | None = None  # the latest releases of the private data set
    budget: Mapping[str, Any] = field(default_factory=dict)  # `Remaining.to_json`
    settings: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    private_paths: tuple[str, ...] = ()  # settings that name files of private text
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # warnings on the interpretation of the figures
    omissions: tuple[Fact, ...] = ()  # by task: items that readers left out of the sources
    models: tuple[ModelRow, ...]  # of a sweep: one row per setting
    is_sweep: bool = False
    audit: AuditRecord | None = None  # of the training of the DP model
    why_not_audited: str = ""  # the reason; empty if the training was audited
    against: str = ""  # the gate's sentence, if an audit of any run contradicts a model's claim
    # “pattern at rate” -> mean number of units with a canary of that group, counted in the rows
    occurrences: Mapping[str, Value] = field(default_factory=dict)
    labels: tuple[Fact, ...] = ()  # labelled text: number of a type, with its part as the note
    by_epoch: tuple[ModelRow, ...] = ()  # models of trainings that saved several, in their order
    curves: tuple[Curve, ...] = ()
    training: tuple[Fact, ...] = ()
    vocabulary: tuple[Fact, ...] = ()
    phrases: tuple[Fact, ...] = ()

    @property
    def repeat(self) -> str:
        """The command that repeats the run."""
        defaults = {n: f.default for n, f in SweepSettings.model_fields.items()}
        words = [
            f"--set {shlex.quote(f'{name}={value}')}"
            for name, value in self.settings.items()
            if value != defaults.get(name)
        ]
        return " ".join(["./confide run", self.title, *words])

    def model(self, kind: Mode) -> ModelRow | None:
        """Return the first model of this kind, or None if the job trained none."""
        return next((row for row in self.models if row.kind == kind), None)


Labels = frozenset[Label]
_DAY = len("2026-01-01")


def edition_of(report: Report, edition: Edition) -> Report:
    """Return the report without the values that this edition withholds."""
    hidden = _hidden(report, edition)
    if not hidden:
        return report

    shown: Report = _shown(report, hidden)
    # The set of private entity types is private as well.
    types = {kind: Withheld() for model in shown.models for kind in model.f1_by_type}
    models = tuple(
        replace(m, f1_by_type=types) if isinstance(m.score, Withheld) else m for m in shown.models
    )
    # Airflow's key of a run contains its start time. Start and end time together would reveal the
    # size of the data.
    created = shown_day(report.created, report.settings)
    settings = {**report.settings, **dict.fromkeys(report.private_paths, "withheld")}
    shown = replace(shown, settings=settings, models=models)
    return replace(shown, run_key=report.shown_run, created=created)


def shown_day(created: str, settings: Mapping[str, Any]) -> str:
    """Return the date of a report in its publishable edition.

    The report of a private selection has no date, because it depends on a secret number of
    trainings.
    """
    return "withheld" if settings.get("selection") == "random-count" else created[:_DAY]


def _hidden(report: Report, edition: Edition) -> Labels:
    if edition is Edition.OPERATOR or report.made_up:
        return frozenset()
    if report.known_seed:  # a reader with the seed can subtract the noise: no `dp` label holds
        return frozenset({Label.OPERATOR, Label.DP})
    return frozenset({Label.OPERATOR})


def _shown(content: Any, hidden: Labels) -> Any:
    """Return the content without any part whose label is hidden.

    Values and the exposures of a row, which exist by the settings alone, are marked as withheld.
    Other parts are left out: a mark would reveal that there are omissions or held-out texts.
    """
    if isinstance(content, Mapping):
        return {name: _shown(part, hidden) for name, part in content.items()}
    if isinstance(content, tuple):
        secret = [part for part in content if getattr(part, "label", None) in hidden]
        if any(isinstance(part, Exposures) for part in secret):
            return Withheld()
        shown = (_shown(part, hidden) for part in content)
        return tuple(part for part in shown if part is not None)
    if getattr(content, "label", None) in hidden:
        return Withheld() if isinstance(content, Labelled | Withheld) else None
    if not is_dataclass(content) or isinstance(content, type):
        return content
    parts = {part.name: getattr(content, part.name) for part in fields(content)}
    shown_parts = {name: _shown(part, hidden) for name, part in parts.items()}
    whole = replace(content, **shown_parts)
    return _shown_row(whole) if isinstance(whole, ModelRow) else whole


def _shown_row(row: ModelRow) -> ModelRow:
    """Return the row without values that follow from withheld values.

    If the score of a model fine-tuned without privacy is withheld, the row describes the
    pre-trained model alone, and has its cost. Values that depend on private text without noise are
    always marked as withheld, even if there were none; the development part is left out.
    """
    secret = Withheld()
    row = replace(row, mlm_private=secret, perplexity_private=secret, development=None)
    if row.pretrained.infinite:
        row = replace(row, mlm_public=secret, perplexity_public=secret)
    if isinstance(row.score, Withheld):
        cost = row.pretrained if row.cost.infinite else row.cost
        row = replace(row, cost=cost, interval=(secret, secret), best_three=secret, f1_by_type={})
    compared = measure_of([row]).of(row)
    return replace(row, spread=secret if isinstance(compared, Withheld) else row.spread)
