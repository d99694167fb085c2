"""Data models of evidence.json and ledger.json, in which every field is required.

`check_evidence.py` generates the pages of a pack from these data.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from dp_core.audit.protocol import AuditRecord
from dp_core.config.fields import Config
from dp_core.config.privacy import RelationName, UnitName
from tasks.evidence.check_evidence import NOT_STATED

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Words = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class Rederivation(Config):
    """A claim derived by another library.

    Attributes:
        tool: name and version of that library.
        epsilon: ε at the claim's δ; None if it was not derived.
    """

    tool: Words
    epsilon: float | None


class TprCeiling(Config):
    """The largest true positive rate of any membership attack under the claim.

    Attributes:
        fpr: false positive rate.
        tpr: largest true positive rate, from the composed privacy loss distribution.
    """

    fpr: Share
    tpr: Share


class ReleaseEvidence(Config):
    """One release of private data from which the model was made.

    Attributes:
        ledger_id: its entry in ledger.json.
        event: the mechanism as data, which determines ε.
        unit, neighbours: privacy unit and neighbouring relation.
        delta: δ of this release.
        epsilon: ε of this release alone, by PLD at δ.
        rederived: ε by another library.
    """

    ledger_id: Words
    event: dict[str, Any]
    unit: UnitName
    neighbours: RelationName
    delta: Annotated[float, Field(gt=0, lt=1)]
    epsilon: Annotated[float, Field(ge=0)]
    rederived: Rederivation


class DatasetClaim(Config):
    """The claim for the units of one data set. Claims for different data sets do not add up.

    Attributes:
        dataset: its name in the ledger.
        unit: the privacy unit.
        neighbours: the neighbouring relation.
        declared_units: n, a public upper bound; None if an older record does not have it.
        epsilon: ε of all releases together; None if their units or relations differ.
        delta: δ of the same guarantee.
        one_plan: whether the releases were registered as one plan before the first of them.
        assumptions: conditions of the guarantee.
        releases: releases in the order of the model's descent from them.
        rederived: the total by another library; None if there is no total.
        tpr_ceilings: ceilings for membership attacks on one unit; empty if there is no total.
    """

    dataset: Words
    unit: UnitName
    neighbours: RelationName
    declared_units: Annotated[int, Field(ge=1)] | None
    epsilon: Annotated[float, Field(ge=0)] | None
    delta: Annotated[float, Field(gt=0, lt=1)]
    one_plan: bool
    assumptions: tuple[Words, ...]
    releases: Annotated[tuple[ReleaseEvidence, ...], Field(min_length=1)]
    rederived: Rederivation | None
    tpr_ceilings: tuple[TprCeiling, ...]


class PlannedPhase(Config):
    """A number of updates with the same expected batch size in units."""

    steps: int
    expected_batch: float


class TrainedBy(Config):
    """The public settings of the model's private training.

    Attributes:
        ledger_id: ledger entry of its release.
        sampling: method of drawing batches.
        declared_units: n.
        phases: phases in order.
        noise_multiplier: σ of a whole update, divided by the clip norm.
    """

    ledger_id: Words
    sampling: Words
    declared_units: int
    phases: tuple[PlannedPhase, ...]
    noise_multiplier: float
    clip_norm: float
    clipping: Words
    examples_per_step: int
    max_examples_per_unit: int
    noise_bands: int


class ModelIdentity(Config):
    """The identity of the model.

    Attributes:
        step: the step that made it.
        kind, layers, hidden, parameters: its architecture; None if its step does not state it.
        head: task of its fine-tuning; None for a pre-trained model.
        files: SHA-256 of each exported file.
    """

    step: Words
    kind: str | None
    layers: int | None
    hidden: int | None
    parameters: int | None
    head: str | None
    files: dict[str, Sha256]


class OperatorWords(Config):
    """Statements by the operator on a model and its data, which no program can derive."""

    model_name: str = NOT_STATED
    license: str = NOT_STATED
    language: str = NOT_STATED
    contact: str = NOT_STATED
    intended_use: str = NOT_STATED
    out_of_scope_use: str = NOT_STATED
    data_collection: str = NOT_STATED
    data_people: str = NOT_STATED
    legal_basis: str = NOT_STATED
    known_biases: str = NOT_STATED
    access_to_private_data: str = NOT_STATED

    @field_validator("*")
    @classmethod
    def _on_one_line(cls, words: str) -> str:
        return " ".join(words.split()) or NOT_STATED


class StepMeasure(Config):
    """One number measured by the model's step."""

    name: Words
    value: float
    label: Literal["dp", "public", "operator"]


class MadeBy(Config):
    """The step's output in the store of the deployment that trained the model."""

    spec_hash: str
    output: Words


class Evidence(Config):
    """The contents of evidence.json."""

    version: Literal[2] = 2
    edition: Literal["publishable", "operator"]
    made_up: bool  # the private text was synthetic or public
    created: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    model: ModelIdentity
    claims: Annotated[tuple[DatasetClaim, ...], Field(min_length=1)]
    trained_by: TrainedBy | None
    audits: Annotated[tuple[AuditRecord, ...], Field(min_length=1)]
    measures: tuple[StepMeasure, ...]
    operator_words: OperatorWords
    made_by: MadeBy
    versions: Annotated[dict[str, str], Field(min_length=1)]
    files: dict[str, Sha256]  # every other file of the pack


class LedgerEntry(Config):
    """One entry of the privacy ledger, without withheld fields.

    Attributes:
        number: position in the order of reservations of the extract.
        of_this_data_set: False for a data set that shares the budget.
        in_this_model: whether the model descends from it.
        plan: number of the run that registered it as part of one plan; 0 if there is none.
        reserved, settled: the day, and in the operator's edition the time.
        seed_hash: salted hash of its secret seed.
        released_hash: keyed digest of the released values.
    """

    number: int
    id: Words
    of_this_data_set: bool
    in_this_model: bool
    event: dict[str, Any]
    unit: UnitName
    neighbours: RelationName
    delta: float
    state: Literal["planned", "reserved", "settled", "withdrawn"]
    accounted: bool
    plan: int
    known_seed: bool
    seed_hash: str
    released_hash: str
    reserved: str
    settled: str


class LedgerExtract(Config):
    """The account of one data set: its budget and all releases charged to it.

    Attributes:
        budget_*: None for synthetic or public data, which have no budget.
        share_spent: spent share of the budget, in the accounting of the ledger.
        left_out: description of the data that the extract omits.
    """

    dataset: Words
    budget_unit: UnitName | None
    budget_neighbours: RelationName | None
    budget_epsilon: float | None
    budget_delta: float | None
    share_spent: float | None
    shares_budget: bool
    entries: tuple[LedgerEntry, ...]
    left_out: Words


class LedgerFile(Config):
    """The contents of ledger.json."""

    version: Literal[2] = 2
    extracts: tuple[LedgerExtract, ...]
