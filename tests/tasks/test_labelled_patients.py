"""Private labels by patient: all documents of one are one unit, or nothing is begun."""

from __future__ import annotations

from pathlib import Path

import pytest
from spec_examples import spec_of
from step_outputs import output_folder

from dp_core.data.ner import Sentence
from dp_core.errors import BadInput
from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import PrivacyUnit
from tasks.execution import contract
from tasks.protocol import EntitiesSpec, RunContext
from tasks.runtime.deployment import Deployment
from tasks.steps.entities_step import read_part, read_text_part
from tasks.steps.finetune_step import units_of

WHO = RunContext(run_key="by-hand", run_name="by hand", task="entities")
SENTENCE = "Pain\tB-problem\n\n"


@pytest.fixture
def spec(untracked: Deployment, tmp_path: Path) -> EntitiesSpec:
    Ledger.open(untracked.ledger).register_dataset("labels", PrivacyUnit.PATIENT, 5.0, 1e-4)
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        for name in ("a", "b"):
            (tmp_path / part / f"{name}.tsv").write_text(SENTENCE)
    (tmp_path / "patients.csv").write_text("a.tsv#0,p\nb.tsv#0,p\n")
    return spec_of(
        EntitiesSpec, public=False, dataset="labels",
        train_path=str(tmp_path / "train"), test_path=str(tmp_path / "test"),
        patients_path=str(tmp_path / "patients.csv"),
    )  # fmt: skip


def test_all_documents_of_a_patient_are_one_unit(untracked: Deployment, spec: EntitiesSpec) -> None:
    result = contract.run_step(spec, untracked, WHO)
    assert result.facts["all_name_a_patient"] is True
    train = read_part(output_folder(untracked, spec.output), "train")
    assert [(s.document_id, s.patient_id) for s in train] == [
        ("a.tsv#0", "p"), ("b.tsv#0", "p")
    ]  # fmt: skip
    assert len(set(units_of(train, PrivacyUnit.PATIENT))) == 1
    assert len(set(units_of(train, PrivacyUnit.DOCUMENT))) == 2
    assert len(set(units_of([*train, *train], PrivacyUnit.EXAMPLE))) == 4


def test_another_list_is_another_version_of_the_data(
    untracked: Deployment, spec: EntitiesSpec, tmp_path: Path
) -> None:
    contract.run_step(spec, untracked, WHO)
    (tmp_path / "patients.csv").write_text("a.tsv#0,p\nb.tsv#0,q\n")
    with pytest.raises(BadInput, match="data_version"):
        contract.run_step(spec, untracked, WHO)


def test_a_document_without_a_patient_is_nobodys(
    untracked: Deployment, spec: EntitiesSpec, tmp_path: Path
) -> None:
    (tmp_path / "patients.csv").write_text("a.tsv#0,p\n")
    with pytest.raises(BadInput, match="every training document"):
        contract.run_step(spec, untracked, WHO)


def test_without_a_list_no_labelled_document_names_a_patient(
    untracked: Deployment, spec: EntitiesSpec
) -> None:
    alone = spec.model_copy(update={"patients_path": ""})
    assert contract.run_step(alone, untracked, WHO).facts["all_name_a_patient"] is False
    nobody = [Sentence(("a",), ("O",), "d")]
    with pytest.raises(BadInput, match="entities_patients"):
        units_of(nobody, PrivacyUnit.PATIENT)


def test_reading_step_hides_whether_private_labels_hold_an_entity(
    untracked: Deployment, spec: EntitiesSpec, tmp_path: Path
) -> None:
    """One unit's entity may be the only one: the step ends alike with and without it."""
    (tmp_path / "train" / "a.tsv").write_text("Pain\tO\n\n")
    with_it = contract.run_step(spec, untracked, WHO)
    (tmp_path / "train" / "b.tsv").write_text("Pain\tO\n\n")
    without = contract.run_step(spec.model_copy(update={"data_version": "2"}), untracked, WHO)
    assert set(with_it.facts) == set(without.facts)


def test_texts_with_a_class_name_their_patients_themselves(
    untracked: Deployment, spec: EntitiesSpec, tmp_path: Path
) -> None:
    rows = ("p\tno pain\tmild pain\tno\n", "q\tno pain\tnone\tyes\n")
    for part in ("train", "test"):
        header = "patient_id\tsentence1\tsentence2\tgold_label\n"
        for name in ("a", "b"):
            (tmp_path / part / f"{name}.tsv").unlink()
        (tmp_path / part / "pairs.tsv").write_text(header + "".join(rows))
    change = {"head": "pairs", "format": "tsv", "patients_path": ""}
    result = contract.run_step(spec.model_copy(update=change), untracked, WHO)
    assert (result.facts["head"], result.facts["all_name_a_patient"]) == ("pairs", True)
    texts = read_text_part(output_folder(untracked, result.outputs["train"]).parent, "train")
    assert units_of(texts, PrivacyUnit.PATIENT) == ["p", "q"]
    assert len({text.document_id for text in texts}) == 1  # the same first text, no id
    assert len(set(units_of(texts, PrivacyUnit.DOCUMENT))) == 2  # of two patients
    assert len(set(units_of([*texts, texts[0]], PrivacyUnit.EXAMPLE))) == 3
    assert {m.name: m.label for m in result.metrics}["train_pairs"] == "operator"
