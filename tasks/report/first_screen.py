"""The first screen of a report: a headline, and what is protected, useful, remembered and audited.

All sentences follow from one edition of the report, so that they contain no number that the tables
of that edition withhold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dp_core.audit.exposure import ExposureSummary, summarise
from dp_core.labels import Label
from dp_core.training.bootstrap import MeanF1
from tasks.report.model import WORDS, ModelRow, Report, measure_of, number_of
from tasks.report.tables import WHY_NO_TOTAL, significant

Tone = Literal["good", "bad", "open"]
_SCORES: dict[str, tuple[str, str]] = WORDS["scores"]  # by field of a row: article and name
_SMALL_GAIN = 0.01  # one percentage point, or one percent of a perplexity


@dataclass(frozen=True)
class Answer:
    """One sentence of the first screen; its label is `operator` if one of its numbers has it."""

    topic: str
    text: str
    label: Label


@dataclass(frozen=True)
class FirstScreen:
    """A headline, the tone in which it is shown, and one sentence for each topic."""

    tone: Tone
    headline: str
    sentences: tuple[Answer, ...]


def first_screen(report: Report) -> FirstScreen:
    """Return the first screen of one edition of a report."""
    tone, headline, remembered = _memory(report)
    audit = report.audit
    if report.against and (audit is None or audit.verdict != "contradicted"):
        tone = "bad"
        headline = "An audit of another run contradicts the claimed ε: do not release this model"
    elif audit is not None:
        tone = "bad" if audit.blocks_promotion else tone
        headline = _of_verdict(audit.verdict)[0]
    elif report.is_sweep:
        headline = "Effect of the settings on privacy and usefulness"
    else:
        remembered = replace(remembered, text=remembered.text.removeprefix(f"{headline}. "))
    protected = Answer("Protected", _protection(report), Label.PUBLIC)
    return FirstScreen(tone, headline, (protected, _usefulness(report), remembered, _audit(report)))


def _private(report: Report) -> list[ModelRow]:
    """Return the model of a job that is trained with DP, or all those of a sweep."""
    rows = [row for row in report.models if row.kind == "dp" and row.baseline is None]
    return rows if report.is_sweep else rows[:1]


def _protection(report: Report) -> str:
    """Return the guarantee of the models trained with DP."""
    private = _private(report)
    whom = f"{report.unit} of “{report.private_dataset}”"
    words: dict[str, str] = WORDS["protection"]
    if not private:
        return words["none"]
    if report.known_seed:
        return words["known_seed"].format(whom=whom)
    if report.is_sweep:
        known = [e for row in private if (e := row.cost.corpus.epsilon) is not None]
        claim = f"ε = {_span(known)}" if len(known) == len(private) else WHY_NO_TOTAL
        return words["sweep"].format(settings=len(private), whom=whom, claim=claim)
    cost, model = private[0].cost, "The model with DP"
    if cost.infinite:
        cost, model = private[0].pretrained, "Before its fine-tuning without privacy, the model"
    totals = (cost.corpus, *cost.others)
    if any(total.epsilon is None for total in totals):
        return words["no_total"].format(model=model, why=WHY_NO_TOTAL)
    claims = " and ".join(
        words["claim"].format(
            unit=total.unit or report.unit,
            dataset=total.dataset or report.private_dataset,
            epsilon=significant(total.epsilon or 0.0),
            delta=significant(total.delta, 2),
        )
        for total in totals
    )
    return words["job"].format(model=model, claims=claims)


def _usefulness(report: Report) -> Answer:
    """Return the scores of the models with DP and of their controls, and the gain by DP."""
    private = _private(report)
    shown = [f for f in _SCORES if any(_number(row, f) is not None for row in private)]
    # A score on public text replaces only a score on private text that is not shown.
    fields = [
        f for f in shown if not (f.endswith("_public") and f.replace("public", "private") in shown)
    ]
    if not fields:
        return Answer("Useful", "No score of a model with DP is shown.", Label.PUBLIC)
    start = report.model("phrases") or report.model("public")
    others = [row for row in (start, report.model("nonprivate")) if row is not None]
    if report.is_sweep:  # masked tokens and perplexities depend on a baseline's vocabulary
        others = [row for row in others if set(fields) <= {"f1", "accuracy"}]
    # A control is compared only if the edition shows all of its scores.
    others = [row for row in others if all(_number(row, f) is not None for f in fields)]
    reached = [f"{' '.join(_SCORES[f])} of {_reached(f, private)}" for f in fields]
    reported = measure_of(private).field != "development"  # whose interval is of the other part
    if reported and len(private) == 1 and (interval := _interval(private[0])):
        reached[0] += f" (95% interval {_span(interval, percent=_is_share(fields[0]))})"
    subject = "The settings with DP reach" if report.is_sweep else "The model with DP reaches"
    text = f"{subject} {' and '.join(reached)}. " + " ".join(
        f"Control “{row.name}”: {' and '.join(_reached(f, [row]) for f in fields)}."
        for row in others
    )
    measured = [f for f in fields if not f.endswith("_public")]
    if start in others and measured:
        text += f" {_gain(private, start, measured)}"
    values = [getattr(row, f) for row in (*private, *others) for f in fields]
    labels = {value.label for value in values if value is not None}
    label = Label.OPERATOR if Label.OPERATOR in labels else Label.DP
    return Answer("Useful", text.strip(), label)


def _gain(private: Sequence[ModelRow], start: ModelRow, fields: Sequence[str]) -> str:
    """Return the gain by DP training over the model `start`, which has not read private text.

    A gain is next to nothing if it is below one point, or if the interval of the score contains the
    score of `start`.
    """
    gains = [{f: _gain_of(row, start, f) for f in fields} for row in private]
    large = [any(not is_small for _, is_small in row.values()) for row in gains]
    sentences: dict[str, str] = WORDS["gain"]
    if len(private) > 1:
        settings = len(private)
        return sentences["settings"].format(start=start.name, large=sum(large), settings=settings)
    words = " and ".join(
        f"{round(100 * gain, 1) + 0.0:+.1f}{' points' if _is_share(f) else '%'} of {_SCORES[f][1]}"
        for f, (gain, _) in gains[0].items()
    )
    little = "nothing" if all(gain <= 0 for gain, _ in gains[0].values()) else "next to nothing"
    return sentences["large" if large[0] else "little"].format(
        epsilon=significant(private[0].epsilon_training),
        start=start.name,
        words=words,
        little=little,
    )


def _gain_of(row: ModelRow, start: ModelRow, field: str) -> tuple[float, bool]:
    """Return a score's gain (of a perplexity, the relative decrease), and whether it is small."""
    value, before = _number(row, field), _number(start, field)
    if value is None or before is None:
        return 0.0, True
    gain = value - before if _is_share(field) else 1 - value / before
    low, high = (field in ("f1", "accuracy") and _interval(row)) or (math.inf, math.inf)
    return gain, gain < _SMALL_GAIN or low <= before <= high


def _number(row: ModelRow, field: str) -> float | None:
    return number_of(getattr(row, field))


def _is_share(field: str) -> bool:
    return not field.startswith("perplexity")


def _interval(row: ModelRow) -> tuple[float, float] | None:
    """Return the 95% interval of the score, if it was measured and is shown."""
    if isinstance(row.spread, MeanF1):
        return row.spread.interval
    ends = [end for value in row.interval or () if (end := number_of(value)) is not None]
    return (ends[0], ends[1]) if len(ends) > 1 else None


def _reached(field: str, rows: Sequence[ModelRow]) -> str:
    values = [value for row in rows if (value := _number(row, field)) is not None]
    return _span(values, percent=_is_share(field))


def _span(values: Sequence[float], *, percent: bool = False) -> str:
    """Return the range of the values, or the value if all are equal."""
    ends = dict.fromkeys(
        f"{100 * end:.1f}%" if percent else significant(end) for end in (min(values), max(values))
    )
    return " – ".join(ends)


def _memory(report: Report) -> tuple[Tone, str, Answer]:
    """Return tone, headline and sentence of the exposure of the models with DP.

    The absence of memory is evidence only if the canaries can be learned at all. The tone is
    therefore open unless a model without privacy remembers them.
    """
    # Settings that differ in fine-tuning alone share their trainings.
    audits = [*dict.fromkeys(exposures for row in _private(report) for exposures in row.audits)]
    if not audits:
        headline = "No audit of a private model"
        return "open", headline, Answer("Remembered", "Memory was not measured.", Label.PUBLIC)
    summaries = [summarise(exposures.rows, models=len(audits)) for exposures in audits]
    summary = min(
        summaries, key=lambda summary: (summary.largest_p_value, -summary.largest.exposure)
    )
    remembering = sum(summary.remembers for summary in summaries)
    control = _control(report)
    labels = {exposures.label for exposures in audits}
    if remembering:
        case = "remembers"
    elif any(summary.above_chance for summary in summaries):
        case = "perhaps"
    elif control is None:
        case = "no_control"
    else:
        case = "control_alone" if control.remembers else "neither"
    words = WORDS["memory"][case]
    headline, meaning = words["headline"], words["meaning"].format(control=control)
    if control is not None and not remembering:
        labels.add(Label.OPERATOR)
    if report.is_sweep:
        headline = f"{remembering} of {len(audits)} private models remember canaries"
    text = WORDS["memory"]["text"].format(headline=headline, summary=summary, meaning=meaning)
    label = Label.OPERATOR if Label.OPERATOR in labels else Label.DP
    return words["tone"], headline, Answer("Remembered", text, label)


def _control(report: Report) -> ExposureSummary | None:
    """Return the exposure of the model without privacy, if the edition shows it."""
    row = report.model("nonprivate")
    return summarise(row.audits[0].rows) if row and row.audits else None


def _audit(report: Report) -> Answer:
    """Return the result of the audit of the claimed ε, or the reason why there is none."""
    if report.against:
        return Answer("Audited", report.against, Label.PUBLIC)
    if (audit := report.audit) is None:
        text = "The result of the audit is for the operator only."
        if report.why_not_audited:
            text = f"The claimed ε was not audited: {report.why_not_audited}."
        return Answer("Audited", text, Label.PUBLIC)
    words = _of_verdict(audit.verdict)[1]
    return Answer("Audited", f"{words} {audit.finding}", audit.label)


def _of_verdict(verdict: str) -> tuple[str, str]:
    """Return the headline and the sentence of the verdict of an audit of the claimed ε."""
    headline, sentence = WORDS["verdicts"].get(verdict, WORDS["verdicts"]["inconclusive"])
    return headline, sentence
