from typing import Any

import pytest
from pydantic import ValidationError

from dp_core.audit.protocol import Audit, AuditRecord, NullDistribution

RUN: dict[str, Any] = {
    "key": "bound",
    "name": "A lower bound",
    "level": "patient",
    "measured": "ε at 95%",
    "value": 1.0,
    "interval": (0.5, 1.5),
    "confidence": 0.95,
    "ceiling": 2.0,
    "ceiling_of": "the claim",
    "power": "up to 3",
    "null_control": NullDistribution(of="coins", low=0.0, high=0.1, alarm_rate=0.001),
    "bounds_claim": True,
    "verdict": "consistent",
    "finding": "Nothing.",
}


@pytest.mark.parametrize(
    "missing", ["level", "value", "interval", "confidence", "null_control", "power"]
)
def test_an_audit_that_was_run_lacks_nothing(missing):
    with pytest.raises(ValidationError, match=f"lacks: {missing}"):
        AuditRecord(**{name: value for name, value in RUN.items() if name != missing})


def test_an_audit_that_was_not_run_has_no_numbers():
    record = Audit("bound", "A lower bound", "ε").not_run("No step measures it.").record
    assert (record.verdict, record.value) == ("not run", None)
    with pytest.raises(ValidationError, match="was not run and has"):
        AuditRecord(**RUN | {"verdict": "not run"})


@pytest.mark.parametrize(
    ("changed", "fits"),
    [
        ({"interval": (2.5, 3.0), "verdict": "contradicted"}, True),
        ({"interval": (2.5, 3.0), "verdict": "consistent"}, False),
        ({"interval": (2.5, 3.0), "verdict": "inconclusive"}, False),
        ({"interval": (1.5, 3.0), "verdict": "contradicted"}, False),
        ({"interval": (2.5, 3.0), "bounds_claim": False, "verdict": "contradicted"}, False),
        ({"interval": (2.5, 3.0), "bounds_claim": False, "verdict": "inconclusive"}, True),
        ({"ceiling": None, "verdict": "contradicted"}, False),
    ],
)
def test_only_and_always_a_bound_above_the_claim_contradicts_it(changed, fits):
    if fits:
        assert AuditRecord(**RUN | changed).interval == changed["interval"]
        return
    with pytest.raises(ValidationError, match="only, and always"):
        AuditRecord(**RUN | changed)


@pytest.mark.parametrize("changed", [{"ceiling": 2.0}, {"bounds_claim": False, "ceiling": None}])
def test_invalid_record_bounds_the_claim_and_has_no_ceiling(changed):
    invalid = {"verdict": "invalid", "ceiling": None, "interval": (2.5, 3.0)}
    assert AuditRecord(**RUN | invalid).blocks_promotion
    with pytest.raises(ValidationError, match="only an audit that bounds the claim is invalid"):
        AuditRecord(**RUN | invalid | changed)
