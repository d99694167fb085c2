"""What may be told to which experiment, and in which order: of lines, before they are sent."""

from __future__ import annotations

import re

from tasks.outbox import Identity, Line

PUBLIC, OPERATOR = "confide", "confide-operator"
_KINDS = ("begin", "metric", "param", "tag", "artifact", "dataset", "model", "end")
_DAY = 86_400_000  # milliseconds
_TIME_OF_DAY = re.compile(r"[ T]\d\d:\d\d.*")


def shown_time(milliseconds: int, identity: Identity, experiment: str) -> int:
    """Return the time that an experiment may know: of private data, the public one knows the day.

    How long a step took tells how large the data are, and of a selection how many trainings.
    """
    if _may_know_times(identity, experiment):
        return milliseconds
    return milliseconds - milliseconds % _DAY


def shown_key(identity: Identity, experiment: str) -> str:
    """Return the run's key as that experiment may know it: Airflow's says when the run began."""
    if _may_know_times(identity, experiment):
        return identity.run_key
    return identity.hidden(identity.run_key)[:16]


def shown_name(identity: Identity, experiment: str) -> str:
    """Return the run's name as that experiment may know it: with the day, not with the time."""
    if _may_know_times(identity, experiment):
        return identity.run_name
    return f"{_TIME_OF_DAY.sub('', identity.run_name)} · {shown_key(identity, experiment)[:6]}"


def _may_know_times(identity: Identity, experiment: str) -> bool:
    return identity.made_up or experiment == OPERATOR


def grouped(lines: list[Line]) -> list[list[Line]]:
    """Return the lines grouped by kind and run; a run begins before, and ends after, the rest.

    The end of an earlier try is left out: a later one has begun, and goes on.
    """
    groups: dict[tuple[str, str, str], list[Line]] = {}
    began = max((at for at, line in enumerate(lines) if line["kind"] == "begin"), default=-1)
    for line in (x for at, x in enumerate(lines) if x["kind"] != "end" or at > began):
        place = (line["kind"], line.get("experiment", ""), line.get("target", ""))
        groups.setdefault(place, []).append(line)
    return [groups[place] for place in sorted(groups, key=lambda p: _KINDS.index(p[0]))]
