import hashlib
import html
import json
import math
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evidence_examples import (
    EARLIER,
    SECRET,
    TRAINING,
    UNITS,
    altered,
    audits_in,
    contents_of,
    pack_of,
    publish_audit,
    released_model,
    settled,
    store_of,
)
from step_outputs import output_folder, publish

from dp_core.audit import extraction
from dp_core.audit.canaries import Canary
from dp_core.audit.exposure import (
    ALONE,
    EMBEDDED,
    EXPOSURE,
    EXPOSURE_IN_ROWS,
    IN_ROWS,
    exposure_finding,
    rows_from_ranks,
)
from dp_core.audit.membership import MembershipRow, Share
from dp_core.audit.membership_sample import MEMBERSHIP, _finding_of_level
from dp_core.audit.protocol import Audit, AuditRecord, Finding
from dp_core.config.audit_settings import ExtractionConfig
from dp_core.config.release import ReleaseRecord
from dp_core.errors import BadInput
from dp_core.labels import Label
from dp_core.privacy import check_evidence
from dp_core.privacy.accounting.tradeoff import PrivacyProfile
from dp_core.privacy.mechanisms import PrivacyUnit, RandomCountSelection, compose
from tasks.evidence.audits import AUDITS, audits_of, subjects_of
from tasks.results import STATEMENT_DATA, STATEMENT_WORDS, read_result
from tasks.runtime.deployment import Deployment
from tasks.storage.store import CHECKSUMS, sha256_of


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def model(deployment: Deployment) -> str:
    return released_model(deployment, settled(deployment, EARLIER, TRAINING))


def _run(script: Path, *options: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-I", *options, str(script), "--json"]
    return subprocess.run(words, cwd=script.parents[1], capture_output=True, text=True, check=False)


def test_pack_is_checked_with_its_script_only(pack):
    answer = _run(pack / "check_evidence.py")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    findings = json.loads(answer.stdout)
    assert findings["faults"] == findings["not_derived"] == []
    assert sum("derived" in line for line in findings["compared"]) == 5


def test_script_without_its_library_ends_with_one_line(pack):
    answer = _run(pack / "check_evidence.py", "-S")
    missing = "check_evidence: dp_accounting is missing: pip install dp-accounting\n"
    assert (answer.returncode, answer.stderr) == (2, missing)


def test_script_imports_no_module_of_the_project():
    source = Path(check_evidence.__file__).read_text()
    imported = re.findall(r"^ *(?:import|from) (\w+)", source, re.MULTILINE)
    assert {*imported} - sys.stdlib_module_names <= {"dp_accounting", "numpy", "scipy"}
    assert "__import__" not in source and "importlib" not in source


def test_claim_is_complete_and_derived_again(pack):
    evidence, statement, ledger = contents_of(pack)
    assert statement["one_plan"] and statement["declared_units"] == UNITS
    (derived,) = evidence["derived"]
    assert derived["epsilon"] == pytest.approx(statement["epsilon"], rel=1e-3)
    whole = PrivacyProfile.of_event(compose(EARLIER, TRAINING))
    for ceiling, rate in zip(derived["tpr_ceilings"], (0.001, 0.01), strict=True):
        assert ceiling["fpr"] == rate
        assert ceiling["tpr"] == pytest.approx(whole.true_positive_rate(rate), rel=1e-3)
    assert evidence["trained_by"]["ledger_id"] == statement["releases"][1]["ledger_id"]
    (extract,) = ledger["extracts"]
    assert [entry["in_this_model"] for entry in extract["entries"]] == [True, True]
    assert evidence["model"]["files"]["model.safetensors"] == sha256(b"weights")


def test_model_card_is_valid_for_hugging_face(pack):
    cards = pytest.importorskip("huggingface_hub").ModelCard
    data = cards.load(pack / "README.md").data.to_dict()
    assert data["library_name"] == "transformers"
    assert "differential-privacy" in data["tags"]
    (claim,) = data["differential_privacy"]
    assert (claim["unit"], claim["delta"]) == ("patient", 2e-6)


def test_page_loads_no_other_resource_and_marks_missing_statements_of_the_operator(
    deployment, model, tmp_path
):
    pack = pack_of(deployment, model, tmp_path / "pack", license="apache-2.0", data_people="none")
    card, page = (pack / "README.md").read_text(), (pack / "evidence.html").read_text()
    assert not re.search(r"""(?:src|href)\s*=|@import|url\(""", page)
    assert "Another library derives no larger ε" in page
    for text in (card, page):
        assert "apache-2.0" in text and "NIST SP 800-226" in text
        assert text.count("not stated by the operator") >= 9


def test_publishable_pack_contains_no_private_text(pack):
    evidence, _, _ = contents_of(pack)
    assert [m["name"] for m in evidence["measures"]] == ["mlm_accuracy_public"]
    for file in pack.iterdir():
        text = file.read_text()
        for planted in (SECRET, "14:03", "12345.6", "0.75"):
            assert planted not in text, file.name
        assert not re.search(r"\d{4}-\d\d-\d\dT\d\d:", text), file.name


def test_operator_edition_is_marked_on_every_page(deployment, model, tmp_path):
    pack = pack_of(deployment, model, tmp_path / "pack", operator=True)
    evidence, _, ledger = contents_of(pack)
    assert f"f1/{SECRET}" in [m["name"] for m in evidence["measures"]]
    assert "T" in ledger["extracts"][0]["entries"][0]["settled"]
    for page in ("README.md", "evidence.html"):
        assert "Operator edition: do not publish" in (pack / page).read_text()
    assert check_evidence.check(pack).code == 0


def _audits(
    deployment: Deployment, uri: str, audit: Audit, *, operator: bool = False
) -> list[AuditRecord]:
    """Return the records of one kind of audit, as an edition of the pack contains them."""
    store = store_of(deployment)
    result = read_result(store, uri)
    records = audits_of(store, subjects_of(store, uri, result), operator=operator)
    return [record for record in records if record.key == audit.key]


OURS = sha256(b"weights")


def _exposed(ranks: float) -> list[Finding]:
    """Return the exposure of canaries of which each has the same rank."""
    canaries = [Canary(f"planted {n}", "HSH", 0.01, (5, 6 + n, 7)) for n in range(4)]
    references = [Canary(f"reference {n}", "HSH", 0.0, (5, 60 + n, 7)) for n in range(4)]
    findings = []
    for audit, contexts, label in (
        (EXPOSURE, (ALONE, EMBEDDED), Label.DP), (EXPOSURE_IN_ROWS, (IN_ROWS,), Label.OPERATOR),
    ):  # fmt: skip
        rows = [
            row
            for context in contexts
            for row in rows_from_ranks(
                canaries, np.full((4, 2), ranks), references, np.full((4, 2), 500.0),
                context=context, candidates=1000, declared_units=UNITS,
            )
        ]  # fmt: skip
        findings.append(exposure_finding(audit, rows, contexts[-1], label))
    return findings


def test_missing_audits_are_listed_as_not_run(pack):
    assert {a.key: a.verdict for a in audits_in(pack)} == {a.key: "not run" for a in AUDITS}
    page = html.unescape((pack / "evidence.html").read_text())
    assert all(audit.name in page for audit in AUDITS)


def test_pack_contains_exposure_of_its_model_only(deployment, model, tmp_path):
    other = sha256(b"other")
    for name, ranks, subject in (("1", 400.0, OURS), ("2", 1.0, other), ("3", 1.0, "")):
        publish_audit(deployment, _exposed(ranks), subject, step="exposure", name=name)
    pack = pack_of(deployment, model, tmp_path / "pack")
    (exposure,) = [a for a in audits_in(pack) if a.key == "exposure"]
    assert exposure.value == pytest.approx(1.32, abs=0.01)
    assert (exposure.verdict, exposure.label, exposure.level) == ("consistent", "dp", "canary")
    assert exposure.null_control is not None and exposure.null_control.alarm_rate == 0.025
    assert len(exposure.rows) == 2
    assert exposure.rows[0]["rank_exposure_p_value"] == pytest.approx(1 / math.comb(8, 4))


@pytest.mark.parametrize("audit", [EXPOSURE_IN_ROWS, MEMBERSHIP, extraction.DISCOVERABLE])
def test_findings_from_training_rows_are_for_the_operator_and_publicly_marked_as_run(
    deployment, model, audit
):
    (exposure,) = [each for each in _exposed(2.0) if each.key == EXPOSURE_IN_ROWS.key]
    finding = exposure.model_copy(update={"key": audit.key, "name": audit.name})
    publish_audit(deployment, [finding], OURS, step=audit.step)
    (shared,) = _audits(deployment, model, audit)
    (full,) = _audits(deployment, model, audit, operator=True)
    assert shared.verdict == "not run" and not shared.rows
    assert "It was run" in shared.finding and "for the operator only" in shared.finding
    assert (full.verdict, full.label) == ("inconclusive", "operator")
    assert full.value == pytest.approx(math.log2(500))


def test_each_level_is_judged_by_its_strongest_membership_attack():
    rows = [
        MembershipRow(
            level, attack, 300, 200, Share(gain, 0.0, 0.5), Share(0.6, 0.5, 0.7),
            (), ceiling, ceiling, None, above,
        )
        for level, attack, gain, ceiling, above in (
            ("sample", "loss", 0.07, 0.3, False), ("sample", "lira", 0.21, 0.3, False),
            ("patient", "loss", 0.45, 0.3, False), ("patient", "lira", 0.13, 0.3, True),
            ("admission", "loss", 0.02, None, False),
        )
    ]  # fmt: skip
    levels = {row.level: [other for other in rows if other.level == row.level] for row in rows}
    findings = [_finding_of_level(MEMBERSHIP, of_level) for of_level in levels.values()]
    values = {finding.level: finding.value for finding in findings}
    assert values == {"example": 0.21, "patient": 0.45, "group": 0.02}
    (alarming,) = [finding for finding in findings if finding.level == "patient"]
    assert (alarming.verdict, alarming.label) == ("inconclusive", "operator")
    assert alarming.finding.endswith("; results above their ceilings need review: lira.")


def test_extraction_finding_states_its_counts_control_and_protocol():
    rows = [
        extraction.compare(decoding, "all", np.arange(12) < 9, np.arange(30) < 2)
        for decoding in (extraction.TOP_K, extraction.GREEDY, extraction.SAMPLING)
    ]
    finding = extraction.extraction_finding(
        extraction.TARGETED, rows, ExtractionConfig(), extraction.FROM_CANARIES, True, Label.DP
    )
    assert (finding.verdict, finding.label, finding.value) == ("inconclusive", "dp", 0.75)
    assert finding.null_control is not None and finding.null_control.p_value < 1e-4
    assert "more than chance" in finding.finding and "2 of 30" in finding.finding
    assert "fixed before the training" in finding.power and "k = 40" in finding.power


def test_absence_of_rows_to_extract_is_for_the_operator(deployment, model):
    config = ExtractionConfig()
    nothing = extraction.extraction_finding(
        extraction.DISCOVERABLE, [], config, extraction.FROM_ROWS, False, Label.OPERATOR
    )
    publish_audit(deployment, [nothing], OURS, step="exposure")
    (shared,) = _audits(deployment, model, extraction.DISCOVERABLE)
    assert shared.verdict == "not run" and "It was run" in shared.finding
    (record,) = _audits(deployment, model, extraction.DISCOVERABLE, operator=True)
    assert (record.verdict, record.label) == ("not run", "operator")
    assert "nothing to try" in record.finding


def test_exported_model_is_identified_by_its_weights(confide, at_home, tmp_path, model):
    given, out = str(tmp_path / "given"), str(tmp_path / "out")
    assert confide("export", given, "--uri", model)[0] == 0
    code, output, _ = confide("evidence", given, "--out", out, "--json")
    assert code == 0
    assert json.loads(output)["sha256"] == sha256_of(tmp_path / "out" / "evidence.json")
    code, output, _ = confide("evidence", given, "--check", out)
    assert code == 0 and output.splitlines()[-1].startswith("HOLDS")
    (tmp_path / "given" / STATEMENT_DATA).write_text("{}")
    code, _, output = confide("evidence", given, "--out", f"{out}2")
    assert code == 2 and f"{STATEMENT_DATA} was changed after the export" in output
    assert len(output.strip().splitlines()) == 1
    (tmp_path / "given" / "model.safetensors").write_bytes(b"other")
    code, output, _ = confide("evidence", given, "--check", out)
    assert code == 1 and "differs from the file named by this evidence" in output
    code, _, output = confide("evidence", given, "--out", f"{out}2")
    assert code == 2 and "no training of this deployment made these weights" in output
    assert not (tmp_path / "out2").exists()


def test_evidence_defaults_to_the_model_of_the_latest_report(
    confide, at_home, deployment, tmp_path, model
):
    store = store_of(deployment)
    publish(
        store, f"store://report/{'b' * 16}", created="2026-01-01",
        models={"With DP / pretraining": model},
    )  # fmt: skip
    words = tmp_path / "words.json"
    words.write_text('{"licence": "none"}')
    out = ["--out", str(tmp_path / "out")]
    code, _, output = confide("evidence", *out, "--words", str(words))
    assert code == 2 and "licence" in output and "license" in output
    code, output, _ = confide("evidence", *out, "--operator")
    assert code == 0 and "SHA-256" in output
    assert all(file.stat().st_mode & 0o077 == 0 for file in (tmp_path / "out").glob("**"))
    assert contents_of(tmp_path / "out")[0]["model"]["step"] == "pretrain"


@pytest.mark.parametrize("name", ["nothing", "no weights"])
def test_folder_without_a_model_or_pack_is_refused(confide, at_home, tmp_path, name):
    if name == "no weights":
        (tmp_path / name).mkdir()
    for words, fault in (
        (("evidence", str(tmp_path / name)), "no model there"),
        (("evidence", "--check", str(tmp_path / name)), "no evidence pack"),
    ):
        code, _, errors = confide(*words)
        assert code == 2 and fault in errors and len(errors.strip().splitlines()) == 1


def _refused(deployment: Deployment, uri: str, tmp_path: Path) -> str:
    with pytest.raises(BadInput) as error:
        pack_of(deployment, uri, tmp_path / "pack")
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


Releases = Callable[[Deployment], list[ReleaseRecord]]
NO_PRIVACY = {"kind": "unaccounted", "version": 1, "unit": "patient", "reason": "for comparison"}


def _settled(settle: bool = True, **changes: Any) -> Releases:
    """Return a function that charges a training, and changes its record afterwards."""
    return lambda deployment: [
        record.model_copy(update=changes) for record in settled(deployment, TRAINING, settle=settle)
    ]


@pytest.mark.parametrize(
    ("releases", "fault"),
    [
        (_settled(event=NO_PRIVACY, ledger_id="used", delta=0.0), "without privacy"),
        (lambda _: [], "without private text"),
        (_settled(seed_known=True), "makes no claim"),
        (_settled(declared_units=10, delta=0.2), "makes no claim"),
        (_settled(settle=False), "has not settled it: it is reserved"),
        (_settled(event=EARLIER.to_json()), "the ledger holds another release"),
        (lambda deployment: settled(deployment, EARLIER, TRAINING)[:1], "does not name"),
    ],
)
def test_model_without_a_claim_or_a_settled_release_is_refused(
    deployment, tmp_path, releases, fault
):
    uri = released_model(deployment, releases(deployment))
    assert fault in _refused(deployment, uri, tmp_path)


def _with_statement(deployment: Deployment, uri: str, change: Change) -> None:
    """Change the statement in the store and update its checksum."""
    folder = output_folder(deployment, uri)
    content = json.loads((folder / STATEMENT_DATA).read_text())
    change(content)
    (folder / STATEMENT_DATA).write_text(json.dumps(content))
    sums = json.loads((folder / CHECKSUMS).read_text())
    sums[STATEMENT_DATA]["sha256"] = sha256_of(folder / STATEMENT_DATA)
    (folder / CHECKSUMS).write_text(json.dumps(sums))


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(epsilon=s["epsilon"] * 0.9), lambda s: s.update(unit="document"),
        lambda s: s.update(delta=1e-9), lambda s: s.update(declared_units=10**6),
        lambda s: s.update(dataset="letters"), lambda s: s.update(neighbours="zero-out-one"),
        lambda s: s["releases"][0]["event"].update(phases=[[1.0, 90.0, 4]]),
        lambda s: s["releases"].pop(), lambda s: s.update(others=[dict(s)]), lambda s: s.clear(),
    ],
)  # fmt: skip
def test_tampered_statement_is_refused(deployment, model, tmp_path, change):
    _with_statement(deployment, model, change)
    assert "statement does not follow from its releases" in _refused(deployment, model, tmp_path)


def test_files_that_differ_from_the_ledger_are_refused(deployment, model, tmp_path):
    without_statement = f"store://pretrain/{'c' * 16}"
    (tmp_path / "empty").mkdir()
    store, result = store_of(deployment), read_result(store_of(deployment), model)
    publish(store, without_statement, tmp_path / "empty", releases=result.releases)
    assert "no privacy statement there" in _refused(deployment, without_statement, tmp_path / "1")
    shutil.rmtree(deployment.seeds)  # otherwise the seeds already reveal the release
    with closing(sqlite3.connect(deployment.home / "ledger.db")) as ledger, ledger:
        ledger.execute("DELETE FROM entries WHERE number = 1")
    assert "the ledger does not hold it" in _refused(deployment, model, tmp_path / "2")
    (output_folder(deployment, model) / STATEMENT_WORDS).write_text("nothing was used")
    assert "damaged" in _refused(deployment, model, tmp_path / "3")


@pytest.mark.parametrize("change", ["changed", "missing", "added"])
def test_changed_missing_and_added_files_are_detected(pack, tmp_path, change):
    for name in sorted(check_evidence.FILES):
        copy = tmp_path / name
        shutil.copytree(pack, copy)
        match change:
            case "changed":
                (copy / name).write_text((copy / name).read_text() + " ")
            case "missing":
                (copy / name).unlink()
            case "added":
                (copy / f"more-{name}").write_text("")
        findings = check_evidence.check(copy)
        assert findings.code == 1 and any(name in fault for fault in findings.faults)


def test_claim_that_cannot_be_rederived_has_a_separate_exit_code(
    deployment, model, tmp_path, monkeypatch
):
    def no_theorem(event: object) -> check_evidence.Reduction:
        raise check_evidence.NotDerivedError("no reduction")

    known = check_evidence.MECHANISMS["poisson_gaussian"]
    monkeypatch.setitem(
        check_evidence.MECHANISMS, "poisson_gaussian", replace(known, reduce=no_theorem)
    )
    pack = pack_of(deployment, model, tmp_path / "pack")
    (derived,) = contents_of(pack)[0]["derived"]
    assert (derived["epsilon"], derived["releases"]) == (None, [None, None])
    findings = check_evidence.check(pack)
    assert findings.code == 4 and len(findings.not_derived) == 3 and not findings.faults
    assert "NOT DERIVED" in check_evidence.as_text(findings)
    page = (pack / "evidence.html").read_text()
    assert "Another library could not derive a part of the claim" in page
    assert "derives no larger" not in page


def test_pack_for_examples_of_a_stated_kind_holds(deployment, tmp_path):
    unit = PrivacyUnit.EXAMPLE
    uri = released_model(
        deployment, settled(deployment, TRAINING.stating(unit, "64 words"), unit=unit)
    )
    pack = pack_of(deployment, uri, tmp_path / "pack")
    assert "for one **example of 64 words**" in (pack / STATEMENT_WORDS).read_text()
    assert check_evidence.check(pack).code == check_evidence.HOLDS

    def of_longer_examples(content: dict[str, Any]) -> None:
        content["releases"][0]["event"]["example"] = "128 words"

    findings = altered(pack, statement=of_longer_examples)
    assert any("the ledger has another event" in fault for fault in findings.faults)


def _of_documents(content: dict[str, Any]) -> None:
    content |= json.loads(json.dumps(content).replace('"patient"', '"document"'))


def _alone(ledger: dict[str, Any]) -> None:
    entries = ledger["extracts"][0]["entries"]
    entries[:] = [entry | {"number": 1} for entry in entries if entry["in_this_model"]]


@pytest.mark.parametrize("files", [["statement", "ledger"], ["ledger"]])
def test_consistent_change_without_a_fault_is_listed_as_recorded(deployment, tmp_path, files):
    releases = settled(deployment, EARLIER, TRAINING)[1:]
    pack = pack_of(deployment, released_model(deployment, releases), tmp_path / "pack")
    findings = altered(pack, **dict.fromkeys(files, _of_documents if files[1:] else _alone))
    assert findings.code == check_evidence.HOLDS
    listed = check_evidence.as_text(findings)
    assert "the unit, if all files state it\n" in listed and "releases of other models:" in listed


@pytest.mark.parametrize(
    ("budget", "names"), [(None, ["notes", "labels"]), ("notes", ["notes and labels"])]
)
def test_each_budget_has_a_separate_claim(deployment, tmp_path, budget, names):
    notes = settled(deployment, EARLIER, spec_hash="1" * 64)
    labels = settled(deployment, TRAINING, dataset="labels", budget=budget)
    uri = released_model(deployment, [*notes, *labels], step="finetune", plan=None)
    pack = pack_of(deployment, uri, tmp_path / "pack")
    evidence, statement, ledger = contents_of(pack)
    claims = check_evidence.claims_of(statement)
    assert [claim["delta"] for claim in claims] == [2e-6 / len(names)] * len(names)
    for parts in (claims, evidence["derived"], ledger["extracts"]):
        assert [part["dataset"] for part in parts] == names
    assert check_evidence.check(pack).code == 0
    if budget:
        return

    def one_claim_for_both(statement: dict[str, Any]) -> None:
        statement["releases"] += statement.pop("others")[0]["releases"]

    assert altered(pack, statement=one_claim_for_both).code == 1


def test_fine_tuned_model_shows_the_audits_of_its_initial_model(deployment):
    records, began = settled(deployment, TRAINING), sha256(b"began")
    uri = released_model(deployment, records, step="finetune", plan=None, began_with=began)
    publish_audit(deployment, _exposed(400.0), began, step="exposure")
    (exposure,) = _audits(deployment, uri, EXPOSURE)
    assert exposure.subject == "the model from which it was fine-tuned"


def test_pack_of_a_private_selection_has_no_date_after_its_charge(deployment, no_mlflow, tmp_path):
    """The days between the charge and later events would reveal the number of trainings."""
    chosen = RandomCountSelection(
        (TRAINING,), count="poisson", mean=3.0, delta=1e-6, unit=TRAINING.unit
    )
    uri = released_model(deployment, settled(deployment, EARLIER, chosen, TRAINING), plan=None)
    *_, ledger = contents_of(pack := pack_of(deployment, uri, tmp_path / "pack"))
    assert check_evidence.check(pack).faults == []
    days = [(len(e["reserved"]), len(e["settled"])) for e in ledger["extracts"][0]["entries"]]
    assert days == [(10, 10), (10, 0), (0, 0)]
    pack = pack_of(deployment, uri, tmp_path / "operator", operator=True)
    assert check_evidence.check(pack).faults == []
    *_, ledger = contents_of(pack)
    entries = ledger["extracts"][0]["entries"]
    assert all(entry["reserved"] and entry["settled"] for entry in entries)
