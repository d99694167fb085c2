import json
from pathlib import Path

import pytest
from spec_examples import spec_of
from step_outputs import output_folder

from dp_core.data.labelled_text import unit_ids
from dp_core.errors import BadInput, PrivateTextRefusal
from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import PrivacyUnit
from tasks.execution import contract
from tasks.protocol.specs import EntitiesSpec, RunContext
from tasks.releases.declarations import declare_public
from tasks.releases.provenance import private_units
from tasks.results import Input
from tasks.runtime.deployment import Deployment
from tasks.steps.entities_step import read_items

CONTEXT = RunContext(run_key="by-hand", run_name="by hand", task="entities")
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


def test_all_documents_of_a_patient_are_one_unit(untracked, spec):
    result = contract.run_step(spec, untracked, CONTEXT)
    assert result.facts["all_name_a_patient"] is True
    train = read_items(output_folder(untracked, spec.output), "train", "entities")
    assert [(s.document_id, s.patient_id) for s in train] == [
        ("a.tsv#0", "p"), ("b.tsv#0", "p")
    ]  # fmt: skip
    assert len(set(unit_ids(train, PrivacyUnit.PATIENT))) == 1
    assert len(set(unit_ids(train, PrivacyUnit.DOCUMENT))) == 2
    assert len(set(unit_ids([*train, *train], PrivacyUnit.EXAMPLE))) == 4


@pytest.mark.cases
def test_changed_list_of_patients_needs_another_data_version_and_every_training_document(
    untracked, spec, tmp_path, patients, reason
):
    if reason == "data_version":
        contract.run_step(spec, untracked, CONTEXT)
    (tmp_path / "patients.csv").write_text(patients)
    with pytest.raises(BadInput, match=reason):
        contract.run_step(spec, untracked, CONTEXT)


def test_labels_without_a_list_of_patients_cannot_have_patient_units(untracked, spec):
    alone = spec.model_copy(update={"patients_path": ""})
    labels = Input(contract.run_step(alone, untracked, CONTEXT), Path())
    with pytest.raises(PrivateTextRefusal, match="entities_patients"):
        private_units(labels).refuse_nameless(PrivacyUnit.PATIENT)


def test_reading_step_hides_whether_private_labels_hold_an_entity(untracked, spec, tmp_path):
    (tmp_path / "train" / "a.tsv").write_text("Pain\tO\n\n")
    with_it = contract.run_step(spec, untracked, CONTEXT)
    (tmp_path / "train" / "b.tsv").write_text("Pain\tO\n\n")
    without = contract.run_step(spec.model_copy(update={"data_version": "2"}), untracked, CONTEXT)
    assert set(with_it.facts) == set(without.facts)


@pytest.mark.parametrize("public", [True, False])
def test_the_scheme_of_private_tags_is_in_no_log(untracked, spec, capfd, public):
    if public:
        for source in spec.sources:
            declare_public(source.uri, untracked, known_private=False)
        spec = spec.model_copy(update={"public": True, "dataset": ""})
    result = contract.run_step(spec, untracked, CONTEXT)
    assert ("train: the tags are iob2" in capfd.readouterr().err) is public
    folder = output_folder(untracked, result.outputs["train"]).parent
    listed = json.loads((folder / "train_quarantine.json").read_text())
    assert listed["schemes"] == ["iob2"]


def test_texts_with_classes_contain_their_patients(untracked, spec, tmp_path):
    rows = ("p\tno pain\tmild pain\tno\n", "q\tno pain\tnone\tyes\n")
    for part in ("train", "test"):
        header = "patient_id\tsentence1\tsentence2\tgold_label\n"
        for name in ("a", "b"):
            (tmp_path / part / f"{name}.tsv").unlink()
        (tmp_path / part / "pairs.tsv").write_text(header + "".join(rows))
    change = {"head": "pairs", "format": "tsv", "patients_path": ""}
    result = contract.run_step(spec.model_copy(update=change), untracked, CONTEXT)
    assert (result.facts["head"], result.facts["all_name_a_patient"]) == ("pairs", True)
    texts = read_items(output_folder(untracked, result.outputs["train"]).parent, "train", "classes")
    assert unit_ids(texts, PrivacyUnit.PATIENT) == ["p", "q"]
    assert len({text.document_id for text in texts}) == 1  # the same first text, without ids
    assert len(set(unit_ids(texts, PrivacyUnit.DOCUMENT))) == 2  # of two patients
    assert len(set(unit_ids([*texts, texts[0]], PrivacyUnit.EXAMPLE))) == 3
    assert {m.name: m.label for m in result.metrics}["train_pairs"] == "operator"
