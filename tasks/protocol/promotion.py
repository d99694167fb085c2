"""The deployment's rule that decides which registered models get the alias `promotable`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from dp_core.errors import BadInput

VARIABLE = "CONFIDE_PROMOTE"

# audited: models with an audit that could have contradicted the claim and did not.
# unaudited: also models without such an audit.
# approved: either kind, but only after a person has read the verdict and approved the model.
Promotion = Literal["audited", "unaudited", "approved"]


def promotion(environment: Mapping[str, str]) -> Promotion:
    """Return the rule that the environment names, by default `audited`.

    Raises:
        BadInput: the environment names an unknown rule.
    """
    word = environment.get(VARIABLE) or "audited"
    if word not in get_args(Promotion):
        raise BadInput(
            f"unknown rule {word!r}", where=VARIABLE, fix=f"Use {', '.join(get_args(Promotion))}."
        )
    return word  # type: ignore[return-value]  # checked above
