"""The evidence as people read it: a page that needs nothing else, and a model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from dp_core.audit.record import AuditRecord
from dp_core.labels import Label
from tasks.evidence.model import NOT_STATED, Claim, Evidence, LedgerExtract, LedgerFile
from tasks.report import page as report_page
from tasks.report.cells import NOT_MEASURED, Cell, Header, Table, name, number, significant
from tasks.report.page import Mark, Verdict
from tasks.report.results import ARCHITECTURES

_TEMPLATES = Path(__file__).parent / "templates"
_REPORT_TEMPLATES = Path(report_page.__file__).parent / "templates"


def page(evidence: Evidence, ledger: LedgerFile) -> str:
    """Return the page, in the style of the report."""
    style = (_REPORT_TEMPLATES / "style.css").read_text(encoding="utf-8")
    return (
        _environment()
        .get_template("evidence.html.j2")
        .render(
            evidence=evidence,
            edition=evidence.edition,
            style=style,
            verdict=verdict(evidence),
            marks=_marks(evidence),
            subject=subject(evidence),
            claims=[
                {
                    "claim": claim,
                    "promise": _claim_table(claim),
                    "releases": _releases_table(claim),
                    "ceilings": _ceilings_table(claim),
                }
                for claim in evidence.claims
            ],
            audits=_audits_table(evidence),
            not_run=[audit for audit in evidence.audits if audit.verdict == "not run"],
            groups=[t for audit in evidence.audits if (t := _groups_table(audit)) is not None],
            measures=_measures_table(evidence),
            extracts=[(extract, _ledger_table(extract)) for extract in ledger.extracts],
            words=_pairs("words", "Model and data, in the operator’s words", _words(evidence)),
            nist=_nist_table(evidence),
            withheld_mark="",
        )
    )


def model_card(evidence: Evidence) -> str:
    """Return README.md: a model card in Hugging Face's format, its metadata as YAML in front.

    The metadata is written in YAML's flow style: JSON, but for numbers like 2e-06, which YAML takes
    for words.
    """
    return (
        _environment()
        .get_template("README.md.j2")
        .render(
            evidence=evidence,
            metadata={key: _yaml(value) for key, value in _metadata(evidence)},
            subject=subject(evidence),
            words=_words(evidence),
            epsilon=significant,
            not_stated=NOT_STATED,
        )
    )


def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader([_TEMPLATES, _REPORT_TEMPLATES]),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _metadata(evidence: Evidence) -> list[tuple[str, Any]]:
    words, kind = evidence.operator_words, evidence.model.kind
    pipeline = "fill-mask"
    if evidence.model.step == "finetune":
        tags = (evidence.model.head or "entities") == "entities"
        pipeline = "token-classification" if tags else "text-classification"
    if kind in ("gpt2", "llama"):
        pipeline = "text-generation"
    stated = {"language": words.language, "license": words.license}
    return [
        *((key, value) for key, value in stated.items() if value != NOT_STATED),
        ("library_name", "transformers"),
        ("pipeline_tag", pipeline),
        ("tags", ["differential-privacy", "confide", *([kind] if kind else [])]),
        ("datasets", [claim.dataset for claim in evidence.claims]),
        (
            "differential_privacy",
            [
                {
                    "dataset": claim.dataset,
                    "epsilon": claim.epsilon,
                    "delta": claim.delta,
                    "unit": claim.unit,
                    "neighbours": claim.neighbours,
                    "declared_units": claim.declared_units,
                }
                for claim in evidence.claims
            ],
        ),
    ]


def _yaml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {_yaml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and "e" in text and "." not in text:
        return text.replace("e", ".0e")
    return text


def subject(evidence: Evidence) -> str:
    """Return in a few words which model it is."""
    model, words = evidence.model, evidence.operator_words
    kind = ARCHITECTURES.get(model.kind or "", "")
    size = f", {model.layers} layers × {model.hidden}" if model.layers and model.hidden else ""
    said = (
        f"{kind}{size}" if kind else "a fine-tuned model" if model.step == "finetune" else "model"
    )
    return said if words.model_name == NOT_STATED else f"{words.model_name} ({said})"


def verdict(evidence: Evidence) -> Verdict:
    """Return what the pack shows: derived again or not, and whether an audit contradicts it."""
    against = [audit for audit in evidence.audits if audit.verdict == "contradicted"]
    if against:
        detail = " ".join(audit.finding for audit in against)
        return Verdict("bad", "An audit contradicts the claim", detail)
    if invalid := [audit for audit in evidence.audits if audit.verdict == "invalid"]:
        detail = " ".join(audit.finding for audit in invalid)
        return Verdict("bad", "An audit of the claim is invalid", detail)
    run = [audit for audit in evidence.audits if audit.verdict != "not run"]
    audits = {audit.key for audit in evidence.audits}
    beside = (
        f"{len({audit.key for audit in run})} of {len(audits)} audits were run; none contradicts"
        " it. Which were not run is said below."
    )
    totals = [claim.rederived for claim in evidence.claims if claim.rederived is not None]
    every = totals + [r.rederived for claim in evidence.claims for r in claim.releases]
    missing = [one for one in every if one.status != "derived"]
    if missing:
        return Verdict(
            "open",
            "A part of the claim could not be derived by another library",
            f"{len(missing)} of {len(every)} figures: {missing[0].why_not}. {beside}",
        )
    largest = max(abs(one.difference or 0.0) for one in every)
    return Verdict(
        "good",
        "Another library derives the same ε",
        f"{every[-1].tool}, of another maker,"
        f" comes within {100 * max(largest, 1e-6):.2g}% of every ε"
        f" below. {beside}",
    )


def _marks(evidence: Evidence) -> list[Mark]:
    marks = []
    for claim in evidence.claims:
        of = f" of “{claim.dataset}”" if len(evidence.claims) > 1 else ""
        total = "no total" if claim.epsilon is None else significant(claim.epsilon)
        marks.append(Mark(total, f"ε for one {claim.unit}{of}"))
        marks.append(Mark(significant(claim.delta, 2), f"δ{of}"))
        if claim.declared_units:
            marks.append(Mark(significant(claim.declared_units), f"{claim.unit}s declared{of}"))
        for ceiling in claim.tpr_ceilings[-1:]:
            share = f"{100 * ceiling.tpr:.1f} %"
            marks.append(Mark(share, f"most that any attack finds at {ceiling.fpr:.0%} FPR{of}"))
    return marks


def _claim_table(claim: Claim) -> Table:
    plain = {
        "Neighbouring relation": claim.neighbours,
        "Unit": f"one {claim.unit}",
        "Units declared, n": NOT_MEASURED
        if claim.declared_units is None
        else f"{claim.declared_units:,}".replace(",", "\u202f"),
        "ε": "no total" if claim.epsilon is None else f"{claim.epsilon:.5g}",
        "δ": significant(claim.delta, 3),
        "Composition": claim.composition,
    }
    if claim.rederived is not None:
        plain["ε by another library"] = _again(claim.rederived.epsilon, claim.rederived.difference)
    return _pairs(f"claim-{claim.dataset}", f"What is claimed of “{claim.dataset}”", plain)


def _pairs(key: str, caption: str, plain: dict[str, str]) -> Table:
    headers = Header("", numeric=False), Header("", numeric=False)
    return Table(key, caption, headers, tuple((name(a), name(b)) for a, b in plain.items()))


def _again(epsilon: float | None, difference: float | None) -> str:
    if epsilon is None:
        return "not re-derived"
    return f"{epsilon:.5g}" + ("" if difference is None else f" ({_difference(difference)})")


def _releases_table(claim: Claim) -> Table:
    rows = tuple(
        (
            name(release.release, f"entry {release.ledger_id[:8]}"),
            name(release.sampler, release.noise),
            Cell(significant(release.delta, 2), release.delta),
            Cell(f"{release.epsilon:.5g}", release.epsilon),
            Cell(NOT_MEASURED)
            if release.epsilon_rdp is None
            else Cell(f"{release.epsilon_rdp:.5g}", release.epsilon_rdp),
            Cell(
                _again(release.rederived.epsilon, None),
                release.rederived.epsilon,
                detail=_difference(release.rederived.difference),
            ),
        )
        for release in claim.releases
    )
    return Table(
        f"releases-{claim.dataset}",
        f"Every release of “{claim.dataset}” behind the model",
        (
            Header("Release", numeric=False),
            Header("Sampler", "noise beneath", numeric=False),
            Header("δ"),
            Header("ε", "PLD, claimed"),
            Header("ε", "RDP"),
            Header("ε", "dp-accounting"),
        ),
        rows,
    )


def _difference(share: float | None) -> str:
    if share is None:
        return ""
    return f"{share:+.2%}" if abs(share) >= 5e-5 else "to 0.01%"


def _ceilings_table(claim: Claim) -> Table:
    rows = tuple(
        (
            name(f"{100 * ceiling.fpr:.3g} %"),
            Cell(f"{100 * ceiling.tpr:.2f}", ceiling.tpr),
            Cell(f"{100 * ceiling.tpr_of_epsilon_delta:.2f}", ceiling.tpr_of_epsilon_delta),
            Cell(NOT_MEASURED)
            if ceiling.tpr_rederived is None
            else Cell(f"{100 * ceiling.tpr_rederived:.2f}", ceiling.tpr_rederived),
        )
        for ceiling in claim.tpr_ceilings
    )
    return Table(
        f"ceilings-{claim.dataset}",
        "The most that any membership attack can find",
        (
            Header("False positives", numeric=False),
            Header("True positives, most", "by PLD, %"),
            Header("… by (ε, δ) alone", "%"),
            Header("… by dp-accounting", "%"),
        ),
        rows,
    )


def _audits_table(evidence: Evidence) -> Table:
    headers = (
        Header("Audit", "whose model", numeric=False),
        Header("Level", numeric=False),
        Header("Value", "interval"),
        Header("Ceiling"),
        Header("Without memory", "alarm rate"),
        Header("What it could find", numeric=False),
        Header("Verdict", numeric=False),
    )
    rows = tuple(_audit_row(audit) for audit in evidence.audits if audit.verdict != "not run")
    return Table("audits", "Audits that were run", headers, rows)


def _audit_row(audit: AuditRecord) -> tuple[Cell, ...]:
    low, high = audit.interval or (0.0, 0.0)
    null = audit.null_control
    within = f"{low:.3g} … {high:.3g} at {audit.confidence or 0:.0%}"
    return (
        name(audit.name, audit.subject),
        name(audit.level or ""),
        Cell(f"{audit.value or 0.0:.3g}", audit.value, audit.label, detail=within),
        Cell(NOT_MEASURED)
        if audit.ceiling is None
        else Cell(f"{audit.ceiling:.3g}", audit.ceiling),
        Cell(NOT_MEASURED)
        if null is None
        else Cell(f"below {null.high:.3g}", null.high, detail=f"α = {null.alarm_rate:g}"),
        name(audit.power),
        Cell(audit.verdict, audit.verdict, alarm=audit.blocks_promotion),
    )


def _groups_table(audit: AuditRecord) -> Table | None:
    if not audit.rows:
        return None
    columns = list(audit.rows[0])
    rows = tuple(
        tuple(
            name(str(row[c])) if isinstance(row[c], str) else Cell(significant(float(row[c])))
            for c in columns
        )
        for row in audit.rows
    )
    heads = tuple(
        Header(c.replace("_", " "), numeric=not isinstance(audit.rows[0][c], str)) for c in columns
    )
    return Table(f"groups-{audit.key}", f"{audit.name}, {audit.subject}: every group", heads, rows)


def _measures_table(evidence: Evidence) -> Table:
    rows = tuple(
        (name(m.name.replace("_", " ")), number(m.value, Label(m.label))) for m in evidence.measures
    )
    return Table(
        "measures", "What its step measured", (Header("", numeric=False), Header("")), rows
    )


def _ledger_table(extract: LedgerExtract) -> Table:
    rows = tuple(
        (
            name(str(entry.number), entry.id),
            name(entry.release, entry.mechanism),
            Cell(significant(entry.delta, 2), entry.delta),
            name(entry.state, entry.settled or entry.reserved),
            name(str(entry.plan) if entry.plan else NOT_MEASURED),
            name("yes" if entry.in_this_model else "no"),
        )
        for entry in extract.entries
    )
    return Table(
        f"ledger-{extract.dataset}",
        f"Everything that was ever charged to “{extract.dataset}”",
        (
            Header("Entry", numeric=False),
            Header("Release", "mechanism", numeric=False),
            Header("δ"),
            Header("State", "day", numeric=False),
            Header("Plan", numeric=False),
            Header("In this model", numeric=False),
        ),
        rows,
    )


def _words(evidence: Evidence) -> dict[str, str]:
    """Return what the operator stated, or that nothing was, by what it is about."""
    said = evidence.operator_words.model_dump()
    return {
        key.replace("_", " ").capitalize(): " ".join(value.split()).replace("|", "/")
        for key, value in said.items()
    }


def _nist_table(evidence: Evidence) -> Table:
    rows = tuple((name(one.field, one.level), name(one.answer)) for one in evidence.nist_sp_800_226)
    headers = Header("Point", numeric=False), Header("Answer", numeric=False)
    return Table("nist", "NIST SP 800-226, point by point", headers, rows)
