"""Which items a reader did not take: a file for the operator, whatever becomes of the step.

Places are names of files, and a folder may be named after its patient: no line names one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from dp_core.corpus.readers import Quarantine
from dp_core.errors import BadInput
from tasks.workbench import Workbench


@contextmanager
def listed(quarantine: Quarantine, bench: Workbench, file: str) -> Iterator[None]:
    """Read within; then the list lies with the output, or, of a refused source, in the work folder.

    Raises:
        BadInput: what the reader raised; it says where the list is.
    """
    try:
        yield
    except BadInput as error:
        if quarantine.rejected:
            path = bench.durable / file
            path.write_text(json.dumps(quarantine.summary(), indent=1))
            error = BadInput(
                error.what, where=error.where, fix=f"{error.fix} Which ones: {path}".strip()
            )
        raise error from None  # the cause may quote what was read
    (bench.out / file).write_text(json.dumps(quarantine.summary(), indent=1))
