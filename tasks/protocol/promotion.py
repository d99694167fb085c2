"""The deployment's rule for promotion: which registered models get the alias `promotable`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from dp_core.errors import BadInput

VARIABLE = "CONFIDE_PROMOTE"

# audited: what an audit that can contradict a claim was run on, and did not contradict.
# unaudited: also what no such audit was run on.
# approved: neither before a person has approved of it, having read the verdict.
Promotion = Literal["audited", "unaudited", "approved"]


def promotion(environment: Mapping[str, str]) -> Promotion:
    """Return the rule that the environment names; `audited` where it names none.

    Raises:
        BadInput: another word.
    """
    word = environment.get(VARIABLE) or "audited"
    if word not in get_args(Promotion):
        raise BadInput(
            f"unknown rule {word!r}", where=VARIABLE, fix=f"Use {', '.join(get_args(Promotion))}."
        )
    return word  # type: ignore[return-value]  # checked above
