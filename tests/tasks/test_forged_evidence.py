import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from evidence_examples import DATA_FILES, EARLIER, TRAINING, UNIT, altered, signed_again

from dp_core.privacy import check_evidence
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.mechanisms import MechanismEvent, ShuffledGaussian, compose

Change = Callable[[dict[str, Any]], object]


def test_honest_pack_of_the_model_holds(pack, released):
    assert altered(pack).faults == []
    assert check_evidence.check(pack, released).code == check_evidence.HOLDS


def _holders(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        item
        for holder in content.get("extracts") or [content]
        for item in holder.get("entries") or holder["releases"]
    ]


def _each(**values: Any) -> Change:
    """Return a change of all releases of a statement or all entries of a ledger."""
    return lambda content: [item.update(copy.deepcopy(values)) for item in _holders(content)]


def _top(**values: Any) -> Change:
    """Return a change of the extracts of a ledger, or of other content as a whole."""

    def change(content: dict[str, Any]) -> None:
        for holder in content.get("extracts") or [content]:
            holder.update(copy.deepcopy(values))

    return change


def _quieter(content: dict[str, Any]) -> None:
    for item in _holders(content):
        for phase in item["event"]["phases"]:
            phase[1] *= 1.5


def _relabelled(content: dict[str, Any]) -> None:
    _each(neighbours="replace-one")(content)
    for holder in content.get("extracts") or [content]:
        holder["neighbours" if "neighbours" in holder else "budget_neighbours"] = "replace-one"
    if "releases" in content:  # releases of a statement have no such field
        for item in content["releases"]:
            del item["neighbours"]


def _of_examples(content: dict[str, Any]) -> None:
    _each(unit="example")(content)
    for holder in content.get("extracts") or [content]:
        holder["unit" if "unit" in holder else "budget_unit"] = "example"


def _large_delta(content: dict[str, Any]) -> None:
    delta, events = 0.15, (EARLIER, TRAINING)
    for item, event in zip(_holders(content), events, strict=True):
        item["delta"] = delta
        if "epsilon" in item:
            item["epsilon"] = epsilon_pld(event, delta)
    if "extracts" not in content:
        _top(delta=2 * delta, epsilon=epsilon_pld(compose(*events), 2 * delta))(content)


def _shuffled(content: dict[str, Any]) -> None:
    event = ShuffledGaussian(2.0, 3, unit=UNIT)
    for holder in content.get("extracts") or [content]:
        items = holder.get("entries") or holder["releases"]
        del items[1:]
        items[0].update(event=event.to_json(), delta=1e-6)
        if "epsilon" in items[0]:
            items[0]["epsilon"] = epsilon_pld(event, 1e-6)
            holder.update(delta=1e-6, epsilon=items[0]["epsilon"])


def _nested(content: dict[str, Any]) -> None:
    event = _holders(content)[0]["event"]
    for _ in range(400):
        event = {"kind": "composed", "version": 1, "unit": "patient", "events": [event]}
    _holders(content)[0]["event"] = event


def _converted(content: dict[str, Any]) -> None:
    """State a conversion to replace-one, without the δ that its theorem needs."""
    release = content["releases"][0]
    release["event"] = {
        "kind": "restated", "version": 1, "unit": "patient", "event": release["event"],
        "to": "replace-one", "delta": 0.0,
    }  # fmt: skip


_NO_WEIGHTS = {
    "kind": "noised_weights", "version": 1, "unit": "patient",
    "items_per_unit": 8, "scales": [], "checks": [], "largest": 1.0,
}  # fmt: skip


def _audited(**figures: Any) -> Change:
    whole = {
        "level": "patient", "value": 9.5, "interval": [9.0, 10.0], "confidence": 0.95,
        "null_control": {"of": "coins", "low": 0, "high": 1, "alarm_rate": 0.05, "p_value": None},
        "power": "all", "verdict": "consistent", "bounds_claim": True, "ceiling": 30.0,
    }  # fmt: skip
    return lambda evidence: evidence["audits"][1].update(whole | figures)


def _of_derivation(change: Change) -> Change:
    return lambda evidence: change(evidence["derived"][0])


def _entry(**values: Any) -> Change:
    """Return a change of the first entry of the ledger."""
    return lambda ledger: ledger["extracts"][0]["entries"][0].update(values)


def _of_training(**values: Any) -> Change:
    return lambda evidence: evidence["trained_by"].update(values)


def _phases(*phase: float) -> Change:
    return _each(event=TRAINING.to_json() | {"phases": [phase]})


def _no_claim(content: dict[str, Any]) -> None:
    empty = {"derived": [], "trained_by": None} if "derived" in content else {"extracts": []}
    content.update(empty)


def _second_extract(ledger: dict[str, Any]) -> None:
    ledger["extracts"].append(ledger["extracts"][0] | {"dataset": "letters"})


FORGED: dict[str, dict[str, tuple[Change, str]]] = {  # by forged parts: change, reported fault
    "statement": {
        "ε of the claim": (_top(epsilon=0.1), "ε = 0.1 is claimed, but dp_accounting"),
        "ε of a release": (_each(epsilon=0.01), "ε = 0.01 is claimed, but dp_accounting"),
        "ε of a release by Rényi DP": (_each(epsilon_rdp=0.01), "epsilon_rdp is 0.01"),
        "no declared units": (_top(declared_units=None), "different numbers of units"),
        "more noise in the statement": (_quieter, "the ledger has another event"),
        "a settled release left out": (lambda s: s["releases"].pop(0), "δ is not the sum"),
        "another unit": (_top(unit="example"), "unit or neighbours differ from its"),
        "more units declared": (_top(declared_units=10**5), "declare different numbers of units"),
        "a smaller δ": (_top(delta=1e-9), "δ is not the sum"),
        "a statement that claims nothing": (_top(private=False), "private is False"),
        "a statement of a known seed": (_top(seed_known=True), "seed_known has a wrong type"),
        "other ledger entries": (_top(ledger_ids=["x"]), "ledger_ids is ['x']"),
        "the words of a mechanism": (
            lambda s: s["releases"][0].update(mechanism="σ = 99"), "its mechanism is “"
        ),
        "another accounting": (_top(accounting="magic"), "its accounting is not “PLD”"),
        "a statement with a note": (_top(note="ε = 0.01"), "statement.note is unknown"),
        "a statement of an earlier version": (_top(version=0), "statement.version has a"),
        "a claim without releases": (_top(releases=[]), "the claim has no releases"),
        "a number as text": (_top(epsilon="4.9"), "statement.epsilon has a wrong type"),
        "a flag for a number": (_top(delta=True), "delta has a wrong type"),
        "a huge number": (_top(declared_units=10**40), "declared_units has a wrong type"),
        "more than one line": (_top(dataset="x\n\n# ε = 0.01"), "dataset is not text"),
        "a conversion without a theorem": (_converted, "only replace-one needs a δ"),
    },
    "ledger": {
        "a ledger entry removed": (
            lambda f: f["extracts"][0]["entries"].pop(0), "are not numbered in order"
        ),
        "a ledger entry renamed": (_entry(id="x"), "the ledger extract does not contain it"),
        "an entry not settled": (_each(state="reserved"), "has not settled it"),
        "an entry not accounted": (_each(accounted=False), "accounted is False"),
        "an entry of another data set": (
            _each(of_this_data_set=False), "it belongs to another data set"
        ),
        "an entry of another mechanism": (_quieter, "the ledger has another event"),
        "an entry of another δ": (_each(delta=1e-9), "the ledger has another delta"),
        "a known seed": (_each(known_seed=True), "its seed is known"),
        "a day after the evidence": (_each(settled="2999-01-01"), "not in order"),
        "a time of day": (_each(settled="2026-01-01T10:00"), "is not a day"),
        "a budget for another unit": (
            _top(budget_unit="document"), "the budget protects the unit document"
        ),
        "a budget for other neighbours": (
            _top(budget_neighbours="replace-one"), "the budget protects the neighbours replace-one"
        ),
        "releases of two plans": (_entry(plan=2), "were not one plan"),
        "a data set without a claim": (_second_extract, "have different data sets: notes, letters"),
    },
    "statement ledger": {
        "neighbours relabelled": (_relabelled, "has the relation add-or-remove-one"),
        "shuffled epochs as add-or-remove": (
            _shuffled, "its mechanism has the relation zero-out-one"
        ),
        "δ above 1/n": (_large_delta, "δ = 0.3 is not below 1/n for n = 10000 units"),
        "more noise everywhere": (_quieter, "its mechanism is “"),
        "another unit everywhere": (
            _of_examples, "its mechanism does not protect the unit example"
        ),
        "a mechanism without rounds": (_each(event=_NO_WEIGHTS), "its mechanism cannot be read"),
        "nested mechanisms": (_nested, "is nested too deeply"),
        "negative noise": (_phases(0.1, -2.0, 100), "phases[0][1] has a wrong type, or is out of"),
        "endless training": (
            _phases(0.1, 2.0, 10**14), "phases[0][2] has a wrong type, or is out of"
        ),
    },
    "evidence": {
        "a second claim": (_top(claims=[]), "claims is unknown"),
        "the ceiling": (
            _of_derivation(lambda d: d["tpr_ceilings"][0].update(tpr=0.001)),
            "largest TPR at FPR 0.001",
        ),
        "no ceilings": (
            _of_derivation(_top(tpr_ceilings=[])), "its ceilings on attacks are not at"
        ),
        "a ceiling at another rate": (
            _of_derivation(lambda d: d["tpr_ceilings"][0].update(fpr=1e-9, tpr=0.01)),
            "its ceilings on attacks are not at",
        ),
        "the recorded derivation": (
            _of_derivation(_top(epsilon=0.01)), "the pack records another derived ε: 0.01"
        ),
        "a derivation for another data set": (
            _of_derivation(_top(dataset="letters")), "have different data sets: letters"
        ),
        "a derivation of fewer releases": (
            _of_derivation(lambda d: d["releases"].pop()), "ε of 1 releases"
        ),
        "the training's plan": (
            _of_training(noise_multiplier=9.0), "rate, noise or length of the training's plan"
        ),
        "the training's bands": (_of_training(noise_bands=4), "has more bands"),
        "another release as the training": (
            _of_training(ledger_id="none"), "not among the releases"
        ),
        "a bound above the claim": (
            _audited(value=99.0, interval=[98.0, 100.0], ceiling=1000.0), "contradicts the claim"
        ),
        "a bound above its ceiling": (_audited(ceiling=8.0), "contradicts the claim"),
        "an audit that says so": (
            _audited(interval=[0.0, 1.0], verdict="contradicted", finding="ε ≥ 3."),
            "contradicts the claim: ε ≥ 3.",
        ),
        "an audit with half its figures": (
            lambda e: e["audits"][1].update(value=1.0), "if and only if it was run"
        ),
        "an empty interval": (_audited(interval=[1.0, 0.0]), "its interval is empty"),
        "a missing field": (lambda e: e.pop("audits"), "audits is missing"),
        "an unknown field": (_top(seal="ok"), "seal is unknown"),
        "a sentence of promise": (_top(promise=["ε = 0.01"]), "promise is"),
        "no audit at all": (_top(audits=[]), "no audit is listed"),
        "other digits": (_top(created="٢٠٢٦-٠١-٠١"), "created is not text"),
    },
    "evidence ledger": {
        "no claim at all": (_no_claim, "have different data sets"),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "change", "fault"),
    [pytest.param(p, *forged, id=name) for p in FORGED for name, forged in FORGED[p].items()],
)
def test_forged_data_are_refused_with_the_place(pack, parts, change, fault):
    findings = altered(pack, **dict.fromkeys(parts.split(), change))
    assert findings.code == check_evidence.FAULTY
    assert any(fault in line for line in findings.faults), findings.faults


def test_replace_one_with_the_delta_of_add_or_remove_is_refused(pack):
    """The δ under replace-one is (1 + e^ε)δ, but the forged release claims the smaller δ."""

    def change(content: dict[str, Any]) -> None:
        _relabelled(content)
        for item in _holders(content):
            event = {
                "kind": "restated", "version": 1, "unit": "patient", "event": item["event"],
                "to": "replace-one", "delta": item["delta"],
            }  # fmt: skip
            item["event"] = event
            if "mechanism" in item:
                item["epsilon_rdp"] = None
                item["mechanism"] = MechanismEvent.from_json(event).describe()
            if "epsilon" in item:
                item["epsilon"] *= 2
        if "accounting" in content:
            content["accounting"] = (
                "PLD, in which the parts without one enter as the (ε, δ) proven for them"
            )
        if "extracts" not in content:
            _top(epsilon=2 * content["epsilon"])(content)

    findings = altered(pack, statement=change, ledger=change)
    assert any("dp_accounting derives inf" in line for line in findings.faults), findings.faults


@pytest.mark.parametrize("name", sorted(check_evidence.FILES - {check_evidence.SCRIPT}))
def test_page_with_another_figure_is_refused(pack, name):
    text = (pack / name).read_text()
    epsilon = json.loads((pack / check_evidence.STATEMENT).read_text())["epsilon"]
    forged = text.replace(f"{epsilon:.4g}"[:4], "0.01")
    if name == check_evidence.LEDGER:
        forged = text.replace("1e-06", "1e-09")
    assert forged != text
    (pack / name).write_text(forged)
    findings = signed_again(pack)
    assert findings.code == check_evidence.FAULTY and findings.faults


def test_pages_that_say_more_than_the_data_are_refused(pack):
    for name in (check_evidence.PAGE, check_evidence.CARD, check_evidence.WORDS):
        text = (pack / name).read_text()
        (pack / name).write_text(text + "\nIn practice nothing can be inferred.\n")
        assert signed_again(pack).faults == [
            f"{name} differs from the page generated from the data"
        ]
        (pack / name).write_text(text)


def test_pack_with_a_changed_script_is_refused(pack):
    script = pack / check_evidence.SCRIPT
    script.write_text(script.read_text() + "\n")
    with pytest.raises(check_evidence.NotAPackError, match="the pack has another check_evidence"):
        signed_again(pack)


@pytest.mark.parametrize("where", ["named", "not named"])
def test_second_statement_is_refused(pack, where):
    (pack / "statement_2.json").write_text("{}")
    if where == "named":
        evidence = json.loads((pack / check_evidence.EVIDENCE).read_text())
        evidence["files"]["statement_2.json"] = ""
        (pack / check_evidence.EVIDENCE).write_text(json.dumps(evidence))
    assert any("statement_2.json" in line for line in signed_again(pack).faults)


def test_link_in_place_of_a_file_is_refused(pack, tmp_path):
    (pack / check_evidence.PAGE).rename(tmp_path / "page")
    (pack / check_evidence.PAGE).symlink_to(tmp_path / "page")
    assert check_evidence.check(pack).faults == ["evidence.html is not a regular file"]


def _linked_weights(model: Path) -> None:
    shutil.move(model / "model.safetensors", model.parent / "weights")
    (model / "model.safetensors").symlink_to(model.parent / "weights")


FORGED_MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "other weights": (
        lambda m: (m / "model.safetensors").write_bytes(b"other"),
        "model.safetensors differs from",
    ),
    "weights of another name": (
        lambda m: (m / "model.safetensors").rename(m / "decoy.safetensors"),
        "contains decoy.safetensors",
    ),
    "weights as a link": (_linked_weights, "model.safetensors is not a regular file"),
    "more weights": (
        lambda m: (m / "pytorch_model.bin").write_bytes(b"x"),
        "contains pytorch_model",
    ),
    "weights in a folder": (
        lambda m: shutil.copytree(m, m / "onnx"),
        "contains onnx/model.safetensors",
    ),
    "a missing file": (lambda m: (m / "config.json").unlink(), "lacks config.json"),
    "another PRIVACY.md": (lambda m: (m / "PRIVACY.md").write_text("ε = 0"), "PRIVACY.md differs"),
    "code": (lambda m: (m / "modeling.py").write_text(""), "contains modeling.py"),
}


@pytest.mark.parametrize("forged", FORGED_MODELS)
def test_forged_model_folder_is_refused(pack, released, forged):
    change, fault = FORGED_MODELS[forged]
    change(released)
    findings = check_evidence.check(pack, released)
    assert findings.code == check_evidence.FAULTY
    assert any(fault in line for line in findings.faults), findings.faults


def test_model_with_another_statement_than_the_pack_is_refused(pack, released):
    (released / "PRIVACY.md").write_text("ε = 0.01")
    digest = check_evidence._digest_of(released / "PRIVACY.md")
    altered(pack, evidence=lambda e: e["model"]["files"].update({"PRIVACY.md": digest}))
    findings = check_evidence.check(pack, released)
    assert "the model and the pack have different files PRIVACY.md" in findings.faults


@pytest.mark.parametrize(
    "text",
    [
        '{"version": 3, "version": 3}',
        '{"version": 3, "claims": NaN}',
        '{"version": 3, "claims": -Infinity}',
        '{"version": 3, "claims": 1e999}',
        '{"version": 3, "claims": ' + "[" * 200_000 + "]" * 200_000 + "}",
        '{"version": 3, "claims": ' + "9" * 5000 + "}",
        '{"version": 3',
        "[]",
    ],
    ids=["twice", "nan", "infinity", "overflow", "nested", "digits", "cut", "list"],
)
def test_text_that_is_not_strict_json_is_refused(pack, text):
    (pack / check_evidence.EVIDENCE).write_text(text)
    assert check_evidence.main([str(pack)]) == check_evidence.NO_PACK


def _leaves(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(part, (*place, key))
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _leaves(part, (*place, number))
    else:
        yield place


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 0.9 if isinstance(value, float) else max(value - 1, value == 0)
    if isinstance(value, str) and value:
        return value[:-1] + ("1" if value.endswith("0") else "0")
    return "0"


@pytest.mark.parametrize("name", DATA_FILES.values())
def test_every_value_is_derived_or_listed_as_recorded(pack, name, monkeypatch):
    derive = check_evidence.derive
    known: dict[str, check_evidence.Derived] = {}

    def remembered(events: Any, delta: float, rates: Any = ()) -> check_evidence.Derived:
        key = json.dumps([events, delta, rates])
        return known.setdefault(key, known.get(key) or derive(events, delta, rates))

    monkeypatch.setattr(check_evidence, "derive", remembered)
    (part,) = (part for part, file in DATA_FILES.items() if file == name)
    honest = {file.name: file.read_text() for file in pack.iterdir()}
    data = json.loads(honest[name])
    for place in _leaves(data):
        for file, text in honest.items():
            (pack / file).write_text(text)

        def change(content: dict[str, Any], place: tuple[Any, ...] = place) -> None:
            *above, last = place
            for key in above:
                content = content[key]
            content[last] = _other(content[last])

        field = re.sub(r"\.\[\]", "[]", ".".join("[]" if type(p) is int else str(p) for p in place))
        recorded = check_evidence.RECORDED.get(name, ())
        if place[0] == "files" or any(
            field == r or field.startswith((f"{r}.", f"{r}[")) for r in recorded
        ):
            continue
        try:
            findings = altered(pack, **{part: change})
        except check_evidence.NotAPackError:
            continue
        assert findings.code != check_evidence.HOLDS, field


def test_recorded_fields_are_printed_and_shown_on_the_page(pack):
    text = check_evidence.as_text(check_evidence.check(pack))
    page = (pack / check_evidence.PAGE).read_text()
    for fields in check_evidence.RECORDED.values():
        assert ", ".join(fields) in text and ", ".join(fields) in page


def test_claim_above_the_derivation_is_accepted(pack):
    def weaker(content: dict[str, Any]) -> None:
        content["epsilon"] *= 2
        for release in content["releases"]:
            release["epsilon"] *= 2
            release["epsilon_rdp"] *= 2

    findings = altered(pack, statement=weaker)
    assert findings.code == check_evidence.HOLDS, findings.faults
