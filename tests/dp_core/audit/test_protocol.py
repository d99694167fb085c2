import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dp_core.audit.protocol import Audit, AuditRecord

RECORDS = json.loads((Path(__file__).parent / "audit_records.json").read_text())
RUN: dict[str, Any] = RECORDS["run"]


@pytest.mark.cases
def test_an_audit_that_was_run_lacks_nothing(missing):
    with pytest.raises(ValidationError, match=f"lacks: {missing}"):
        AuditRecord(**{name: value for name, value in RUN.items() if name != missing})


def test_an_audit_that_was_not_run_has_no_numbers():
    record = Audit("bound", "A lower bound", "ε").not_run("No step measures it.").record
    assert (record.verdict, record.value) == ("not run", None)
    with pytest.raises(ValidationError, match="was not run and has"):
        AuditRecord(**RUN | {"verdict": "not run"})


@pytest.mark.parametrize(("changed", "fits"), RECORDS["changed"])
def test_only_and_always_a_bound_above_the_claim_contradicts_it(changed, fits):
    if fits:
        assert AuditRecord(**RUN | changed).interval == tuple(changed["interval"])
        return
    with pytest.raises(ValidationError, match="only, and always"):
        AuditRecord(**RUN | changed)


@pytest.mark.parametrize("changed", [{"ceiling": 2.0}, {"bounds_claim": False, "ceiling": None}])
def test_invalid_record_bounds_the_claim_and_has_no_ceiling(changed):
    invalid = {"verdict": "invalid", "ceiling": None, "interval": (2.5, 3.0)}
    assert AuditRecord(**RUN | invalid).blocks_promotion
    with pytest.raises(ValidationError, match="only an audit that bounds the claim is invalid"):
        AuditRecord(**RUN | invalid | changed)
