"""Which texts a job reads."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from tasks.protocol.fields import DATA, NAME, NAME_OR_NONE, setting
from tasks.protocol.specs import Frozen

MADE_UP = "synthetic-notes"


class DataSettings(Frozen):
    """The private corpus, the public one, and the sentences with labelled entities."""

    private_format: Literal["synthetic", "text", "jsonl", "noteevents"] = setting(
        "synthetic",
        DATA,
        "Private corpus: format",
        "synthetic: notes of the project's own making; text: a folder of .txt, in a subfolder for "
        "each patient; jsonl: one JSON object a line (names of its fields: under Advanced); "
        "noteevents: CSV in MIMIC-III's NOTEEVENTS columns. Files may be .gz or .xz.",
    )
    private_path: str = setting(
        "", DATA, "Private corpus: path", "File or folder (local or gs://); empty for synthetic."
    )
    private_dataset: str = setting(
        MADE_UP,
        DATA,
        "Private data set",
        "Its name in the privacy ledger: every release of it is charged to this name.",
        pattern=NAME,
    )
    public_format: Literal["synthetic", "text", "jsonl"] = setting(
        "synthetic",
        DATA,
        "Public corpus: format",
        "synthetic, text or jsonl, as for the private corpus; it needs no privacy.",
    )
    public_path: str = setting(
        "",
        DATA,
        "Public corpus: path",
        "File or folder (local or gs://) that the operator has declared public (confide ledger "
        "declare-public); empty for synthetic.",
    )
    entities_format: Literal["synthetic", "i2b2", "columns", "pubtator"] = setting(
        "synthetic",
        DATA,
        "Entities: format",
        "i2b2: folders of .txt and .con; columns: token and tag (IOB, IOB2); pubtator.",
    )
    entities_train: str = setting(
        "",
        DATA,
        "Entities: training path",
        "File or folder (local or gs://) of labelled sentences to learn from; empty for synthetic.",
    )
    entities_test: str = setting(
        "",
        DATA,
        "Entities: test path",
        "File or folder (local or gs://) of labelled sentences that give F1; empty for synthetic.",
    )
    entities_patients: str = setting(
        "",
        DATA,
        "Entities: patients",
        "File (.csv or .tsv, local or gs://) whose lines name a training document and its patient; "
        "private fine-tuning needs it to protect patients. Documents are named as the reader names "
        "them: i2b2 by path without suffix, pubtator by id, columns by file#number from 0.",
    )
    entities_dataset: str = setting(
        "",
        DATA,
        "Entities: data set",
        "Its name in the privacy ledger, if the labels are private; empty: the private data set, "
        "whose people they may be about.",
        pattern=NAME_OR_NONE,
    )
    entities_public: bool = setting(
        False,
        DATA,
        "Entities: public",
        "Tick if the operator has declared both label files public (confide ledger "
        "declare-public). Otherwise F1 on them is the operator's alone.",
    )
    all_public: bool = setting(
        False,
        DATA,
        "Everything may be shown",
        "Tick only if the operator has declared every corpus and label file given here public, "
        "and registered the data set so (confide ledger declare-public, register --public): then "
        "nothing is hidden in MLflow and the report. Else the run is refused.",
    )
    data_version: str = setting(
        "1",
        DATA,
        "Data version",
        "Change it when the files change: results are reused for the same settings only.",
        pattern=NAME,
    )
    synthetic_patients: int = setting(
        6000,
        DATA,
        "Synthetic patients",
        "How many made-up patients write notes.",
        ge=50,
        le=200_000,
    )

    @property
    def entities_shown(self) -> bool:
        """Whether the labelled sentences are public or made up."""
        return self.all_public or self.entities_public or self.entities_format == "synthetic"

    @property
    def entities_charged_to(self) -> str:
        """Name in the ledger of private labels; empty if they are public or made up."""
        if self.entities_shown:
            return ""
        private = self.private_dataset if self.private_format != "synthetic" else ""
        return self.entities_dataset or private or "private-labels"

    @property
    def made_up(self) -> bool:
        """Whether the run calls every input made up or public; the ledger must agree."""
        synthetic = self.private_format == "synthetic" and self.entities_format == "synthetic"
        return self.all_public or synthetic

    @model_validator(mode="after")
    def _paths_belong_to_formats(self) -> Self:
        for kind, fmt, paths in (
            ("private", self.private_format, [self.private_path]),
            ("public", self.public_format, [self.public_path]),
            ("entities", self.entities_format, [self.entities_train, self.entities_test]),
        ):
            if fmt != "synthetic" and not all(paths):
                raise ValueError(f"{kind}: format {fmt} needs a path")
            if fmt == "synthetic" and any(paths):
                raise ValueError(f"{kind}: format synthetic takes no path")
        if self.entities_format == "synthetic" and self.entities_patients:
            raise ValueError("entities: format synthetic takes no list of patients")
        if self.private_format == "synthetic" and self.private_dataset != MADE_UP:
            raise ValueError(f"the synthetic corpus is the data set {MADE_UP!r}")
        if self.private_format != "synthetic" and self.private_dataset == MADE_UP:
            raise ValueError(f"private_dataset must name your data set: {MADE_UP!r} is made up")
        if self.entities_dataset and self.entities_shown:
            raise ValueError("entities_dataset: public or made-up labels are charged to nobody")
        if self.entities_dataset == MADE_UP:
            raise ValueError(f"entities_dataset must name your data set: {MADE_UP!r} is made up")
        return self
