"""The ways to the clipped sum, by name; one contract, that of `engine.clipped_sum`."""

from __future__ import annotations

from typing import Protocol

from dp_core.bert.layers import Tensor, Variables
from dp_core.errors import BadInput
from dp_core.privacy.clipping.engine import ClippedSum, UnitLosses, clipped_sum
from dp_core.privacy.clipping.factors import Factors, flat_factors
from dp_core.privacy.clipping.naive import naive_clipped_sum
from dp_core.privacy.clipping.toolbox import toolbox_clipped_sum


class Engine(Protocol):
    """What every engine is: `engine.clipped_sum` says what it promises."""

    def __call__(
        self,
        unit_losses: UnitLosses,
        parameters: Variables,
        units: int,
        clip_norm: float | Tensor,
        *,
        factors_of: Factors = flat_factors,
        precision: str = "float32",
    ) -> ClippedSum:
        """Clip each unit's gradient and add them up."""


_ENGINES: dict[str, Engine] = {
    "book-keeping": clipped_sum,
    "tensorflow-privacy": toolbox_clipped_sum,
    "naive": naive_clipped_sum,
}
ENGINES = tuple(_ENGINES)


def engine_named(name: str) -> Engine:
    """Return `book-keeping`, `tensorflow-privacy` or `naive`.

    Raises:
        BadInput: no such engine.
    """
    if name not in _ENGINES:
        raise BadInput(
            f"{name!r} is no engine", where="engine", fix=f"Use one of {', '.join(ENGINES)}."
        )
    return _ENGINES[name]
