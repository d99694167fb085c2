"""What may be told to which experiment, and in which order: of lines, before they are sent."""

from __future__ import annotations

from tasks.outbox import Identity, Line

PUBLIC, OPERATOR = "confide", "confide-operator"
_KINDS = ("begin", "metric", "param", "tag", "artifact", "dataset", "model", "end")
_DAY = 86_400_000  # milliseconds


def shown_time(milliseconds: int, identity: Identity, experiment: str) -> int:
    """Return the time that an experiment may know: of private data, the public one knows the day.

    How long a step took tells how large the data are, and of a selection how many trainings.
    """
    if identity.made_up or experiment == OPERATOR:
        return milliseconds
    return milliseconds - milliseconds % _DAY


def grouped(lines: list[Line]) -> list[list[Line]]:
    """Return the lines grouped by kind and run; a run begins before, and ends after, the rest."""
    groups: dict[tuple[str, str, str], list[Line]] = {}
    for line in lines:
        place = (line["kind"], line.get("experiment", ""), line.get("target", ""))
        groups.setdefault(place, []).append(line)
    return [groups[place] for place in sorted(groups, key=lambda p: _KINDS.index(p[0]))]
