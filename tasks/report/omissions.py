"""Items that a reader left out of a source, counted by reason and described in words.

A reader leaves out unusable items, up to a tenth of a source. The counts of private text appear
only in the operator's edition of a report and on the terminal of `confide run`.
"""

from __future__ import annotations

from collections.abc import Callable

from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.labels import Label, Labelled
from tasks.context import StepContext
from tasks.protocol import StepResult

_LEFT_OUT, _PASSED_OVER = "_quarantined", "_passed_over"  # endings of the metrics' names
_FIX = "`iconv -f WINDOWS-1252 -t UTF-8` converts text of older Windows systems"


def measure_omissions(
    context: StepContext, items: str, quarantine: Quarantine, label: Callable[[float], Labelled]
) -> None:
    """Record the numbers of items that a reader left out of a source, in total and by reason.

    Args:
        context: the step that read the source.
        items: name of the source's items, for example `documents`.
        quarantine: the reader's counts of left out items.
        label: `Operator` if the source is private.
    """
    context.measure(f"{items}{_LEFT_OUT}", label(quarantine.rejected))
    for reason, number in quarantine.counts.items():
        context.measure(f"{items}{_LEFT_OUT}/{reason.name.lower()}", label(number))
    if quarantine.passed_over:
        context.measure(f"{items}{_PASSED_OVER}", label(quarantine.passed_over))


def omissions_of(result: StepResult) -> tuple[str, Label] | None:
    """Return one line on all items that a step left out, with its label, or None without any."""
    parts: list[str] = []
    fix, label = "", Label.PUBLIC
    counts = {m.name: m for m in result.metrics if m.value}
    for name, metric in sorted(counts.items()):
        if name.endswith(_LEFT_OUT):
            items = name.removesuffix(_LEFT_OUT).replace("_", " ")
            reasons = {r: counts.get(f"{name}/{r.name.lower()}") for r in Reason}
            by_reason = ", ".join(f"{r}: {m.value:.0f}" for r, m in reasons.items() if m)
            parts.append(f"{items} left out: {metric.value:.0f} ({by_reason})")
            fix = fix or (_FIX if reasons[Reason.ENCODING] else "")
        elif name.endswith(_PASSED_OVER):
            parts.append(f"files of other formats passed over: {metric.value:.0f}")
        else:
            continue
        label = Label(metric.label)
    return ("; ".join([*parts, *([fix] if fix else [])]), label) if parts else None
