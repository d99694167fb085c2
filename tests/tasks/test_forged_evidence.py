import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from evidence_examples import DATA_FILES, EARLIER, TRAINING, UNIT, altered, signed_again

from dp_core.privacy import check_evidence
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.mechanisms import ShuffledGaussian, compose


def test_honest_pack_of_the_model_holds(pack, released):
    assert altered(pack).faults == []
    card = (pack / "README.md").read_text().replace("library_name:", "library_name:  ")
    (released / "README.md").write_text(f"{card}\nMore words of the operator.")
    assert check_evidence.check(pack, released).code == check_evidence.HOLDS


def _extracts(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the extracts of a ledger, or other content as a whole."""
    return content.get("extracts") or [content]


def _holders(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        item
        for holder in _extracts(content)
        for item in holder.get("entries") or holder["releases"]
    ]


def each(content: dict[str, Any], **values: Any) -> None:
    """Change all releases of a statement or all entries of a ledger."""
    for item in _holders(content):
        item.update(copy.deepcopy(values))


def top(content: dict[str, Any], **values: Any) -> None:
    for holder in _extracts(content):
        holder.update(copy.deepcopy(values))


def at(content: Any, place: list[str | int], **values: Any) -> None:
    for key in place:
        content = content[key]
    content.update(copy.deepcopy(values))


def removed(content: Any, place: list[str | int]) -> None:
    for key in place[:-1]:
        content = content[key]
    del content[place[-1]]


def quieter(content: dict[str, Any]) -> None:
    for item in _holders(content):
        for phase in item["event"]["phases"]:
            phase[1] *= 1.5


def relabelled(content: dict[str, Any]) -> None:
    each(content, neighbours="replace-one")
    for holder in _extracts(content):
        holder["neighbours" if "neighbours" in holder else "budget_neighbours"] = "replace-one"
    if "releases" in content:  # releases of a statement have no such field
        for item in content["releases"]:
            del item["neighbours"]


def of_examples(content: dict[str, Any]) -> None:
    each(content, unit="example")
    for holder in _extracts(content):
        holder["unit" if "unit" in holder else "budget_unit"] = "example"


def large_delta(content: dict[str, Any]) -> None:
    delta, events = 0.15, (EARLIER, TRAINING)
    for item, event in zip(_holders(content), events, strict=True):
        item["delta"] = delta
        if "epsilon" in item:
            item["epsilon"] = epsilon_pld(event, delta)
    if "extracts" not in content:
        top(content, delta=2 * delta, epsilon=epsilon_pld(compose(*events), 2 * delta))


def shuffled(content: dict[str, Any]) -> None:
    event = ShuffledGaussian(2.0, 3, unit=UNIT)
    for holder in _extracts(content):
        items = holder.get("entries") or holder["releases"]
        del items[1:]
        items[0].update(event=event.to_json(), delta=1e-6)
        if "epsilon" in items[0]:
            items[0]["epsilon"] = epsilon_pld(event, 1e-6)
            holder.update(delta=1e-6, epsilon=items[0]["epsilon"])


def nested(content: dict[str, Any]) -> None:
    event = _holders(content)[0]["event"]
    for _ in range(400):
        event = {"kind": "composed", "version": 1, "unit": "patient", "events": [event]}
    _holders(content)[0]["event"] = event


def audited(evidence: dict[str, Any], **figures: Any) -> None:
    whole = {
        "level": "patient", "value": 9.5, "interval": [9.0, 10.0], "confidence": 0.95,
        "null_control": {"of": "coins", "low": 0, "high": 1, "alarm_rate": 0.05, "p_value": None},
        "power": "all", "verdict": "consistent", "bounds_claim": True, "ceiling": 30.0,
    }  # fmt: skip
    evidence["audits"][1].update(whole | figures)


def phases(content: dict[str, Any], phase: list[float]) -> None:
    each(content, event=TRAINING.to_json() | {"phases": [phase]})


def no_claim(content: dict[str, Any]) -> None:
    empty = {"derived": [], "trained_by": None} if "derived" in content else {"extracts": []}
    content.update(empty)


def second_claim(content: dict[str, Any]) -> None:
    name = next((name for name in ("extracts", "derived") if name in content), "others")
    first = content[name][0] if name in content else content
    content[name] = [*content.get(name, ()), first | {"dataset": "letters"}]


CHANGES: dict[str, Callable[..., None]] = {
    change.__name__: change
    for change in (
        at, audited, each, large_delta, nested, no_claim, of_examples, phases, quieter,
        relabelled, removed, second_claim, shuffled, top,
    )
}  # fmt: skip
# By forged parts and name: the change of these parts, its arguments, and the reported fault.
FORGED = json.loads(Path(__file__).with_name("forged_evidence.json").read_text())


@pytest.mark.parametrize(
    ("parts", "change", "values", "fault"),
    [pytest.param(p, *forged, id=name) for p in FORGED for name, forged in FORGED[p].items()],
)
def test_forged_data_are_refused_with_the_place(pack, parts, change, values, fault):
    change = partial(CHANGES[change], **values)
    findings = altered(pack, **dict.fromkeys(parts.split(), change))
    assert findings.code == check_evidence.FAULTY
    assert any(fault in line for line in findings.faults), findings.faults


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
        lambda m: (m / "model.safetensors").write_bytes(b"other"), "model.safetensors differs from",
    ),
    "weights of another name": (
        lambda m: (m / "model.safetensors").rename(m / "x.safetensors"), "contains x.safetensors",
    ),
    "weights as a link": (_linked_weights, "model.safetensors is not a regular file"),
    "more weights": (lambda m: (m / "more.bin").write_bytes(b"x"), "contains more.bin"),
    "weights in a folder": (
        lambda m: shutil.copytree(m, m / "onnx"), "contains onnx/model.safetensors",
    ),
    "a missing file": (lambda m: (m / "config.json").unlink(), "lacks config.json"),
    "another PRIVACY.md": (lambda m: (m / "PRIVACY.md").write_text("ε = 0"), "PRIVACY.md differs"),
    "another claim on the card": (
        lambda m: (m / "README.md").write_text("---\ndifferential_privacy: []\n---\n"),
        "README.md state another claim",
    ),
    "code": (lambda m: (m / "modeling.py").write_text(""), "contains modeling.py"),
}  # fmt: skip


@pytest.mark.parametrize("forged", FORGED_MODELS)
def test_forged_model_folder_is_refused(pack, released, forged):
    change, fault = FORGED_MODELS[forged]
    change(released)
    findings = check_evidence.check(pack, released)
    assert findings.code == check_evidence.FAULTY
    assert any(fault in line for line in findings.faults), findings.faults


@pytest.mark.cases
def test_card_with_metadata_of_another_form_is_refused(pack, released, line):
    """YAML could hide the claim in a text, and state another one."""
    card = (pack / "README.md").read_text().replace("\nlibrary", f"\n{line}\nlibrary", 1)
    (released / "README.md").write_text(card)
    (fault,) = check_evidence.check(pack, released).faults
    assert "README.md are not lines of one key and its value in JSON" in fault


def test_model_with_another_statement_than_the_pack_is_refused(pack, released):
    (released / "PRIVACY.md").write_text("ε = 0.01")
    digest = check_evidence._digest_of(released / "PRIVACY.md")
    altered(pack, evidence=lambda e: e["model"]["files"].update({"PRIVACY.md": digest}))
    findings = check_evidence.check(pack, released)
    assert "the model and the pack have different files PRIVACY.md" in findings.faults


@pytest.mark.cases
def test_text_that_is_not_strict_json_is_refused(pack, text):
    for name, long in (("NESTED", "[" * 200_000 + "]" * 200_000), ("DIGITS", "9" * 5000)):
        text = text.replace(name, long)
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
