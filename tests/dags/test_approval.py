"""A person's approval stands between report and promotion where the deployment asks for it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from jinja2 import Template

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def asked(monkeypatch):
    from airflow.dag_processing.dagbag import DagBag

    monkeypatch.setenv("CONFIDE_PROMOTE", "approved")
    bag = DagBag(CHECKOUT / "dags" / "dp_bert.py")
    assert not bag.import_errors
    return bag.dags["dp_bert"]


def test_nobody_is_asked_where_no_approval_is_set(dags):
    assert not {"approval", "promote"} & set(dags["dp_bert"].task_ids)


def test_promotion_waits_for_the_person_and_the_person_for_the_report(asked):
    assert asked.get_task("approval").upstream_task_ids == {"report"}
    assert asked.get_task("promote").upstream_task_ids == {"approval"}
    for name in ("approval", "promote"):
        assert asked.get_task(name).trigger_rule == "all_success"  # nor after a contradiction


def test_the_report_then_promotes_nothing_and_the_last_step_reads_it(asked):
    task = asked.get_task("promote")
    specs = task.plan({}, "file:///store", None)
    assert specs["report"].promotion == "approved"
    assert specs["promote"].report_uri == specs["report"].output


def test_the_person_reads_the_verdict(asked):
    task = asked.get_task("approval")
    told = {"verdicts": {"dp_pretraining": "ε = 4: consistent with Bound."}}
    body = Template(task.body).render(ti=SimpleNamespace(xcom_pull=lambda **_: told))
    assert "**dp_pretraining**: ε = 4: consistent with Bound." in body
    nothing = Template(task.body).render(ti=SimpleNamespace(xcom_pull=lambda **_: None))
    assert "no model" in nothing
    assert task.options == ["Approve", "Reject"] and task.defaults is None


def test_an_unknown_rule_is_an_import_error_in_one_line(monkeypatch):
    from dags import configuration

    monkeypatch.setenv("CONFIDE_PROMOTE", "always")
    with pytest.raises(ValueError, match="CONFIDE_PROMOTE: unknown rule 'always'"):
        configuration.promotion()
