"""Which items a reader did not take: a file for the operator, whatever becomes of the step.

Places are names of files, and a folder may be named after its patient: no line names one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dp_core.data.readers import Quarantine
from dp_core.errors import BadInput
from tasks.runtime.context import StepContext


@contextmanager
def listed(quarantine: Quarantine, bench: StepContext, file: str) -> Iterator[None]:
    """Read within; then the list lies with the output, or, of a refused source, in the work folder.

    Raises:
        BadInput: what the reader raised; it says where the list is.
    """
    try:
        yield
    except BadInput as error:
        raise _with_list(error, quarantine, bench.durable / file) from None  # a cause may quote
    _write(quarantine, bench.out / file)


def _with_list(error: BadInput, quarantine: Quarantine, path: Path) -> BadInput:
    if not quarantine.rejected:
        return error
    try:
        _write(quarantine, path)
    except OSError:  # a full disk makes bad input no better
        return error
    return BadInput(error.what, where=error.where, fix=f"{error.fix} Which ones: {path}".strip())


def _write(quarantine: Quarantine, path: Path) -> None:
    path.write_text(json.dumps(quarantine.summary(), indent=1))
