"""The classes of all specs by the names of their steps, and the way back from JSON."""

from __future__ import annotations

from typing import Annotated, Any, Union

from pydantic import ConfigDict, Field, TypeAdapter

from tasks.protocol import measurements  # noqa: F401 - defines steps
from tasks.protocol.specs import StepSpec


def _classes(kind: type[StepSpec]) -> dict[str, type[StepSpec]]:
    """Return the subclasses of `kind` that define a step, by the name of the step."""
    classes: dict[str, type[StepSpec]] = {}
    for child in kind.__subclasses__():
        name = child.model_fields["step"].default
        if isinstance(name, str):  # base classes of several steps have no name
            classes[name] = child
        classes |= _classes(child)
    return classes


STEP_CLASSES = _classes(StepSpec)
_ANY_SPEC: Any = Annotated[Union[tuple(STEP_CLASSES.values())], Field(discriminator="step")]  # noqa: UP007
_ADAPTER: TypeAdapter[StepSpec] = TypeAdapter(_ANY_SPEC, config=ConfigDict(defer_build=True))


def spec_from_json(text: str | bytes) -> StepSpec:
    """Return the spec written as JSON.

    Raises:
        pydantic.ValidationError: the text is no spec of a known step; `one_line` formats the error.
    """
    return _ADAPTER.validate_json(text)
