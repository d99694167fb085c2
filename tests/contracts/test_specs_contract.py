"""What orchestrator and steps agree on: specs as JSON, hashes that mean the work, jobs that fit."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from tasks.specs import (
    EntitiesSpec,
    JobSettings,
    RunContext,
    StepSpec,
    SweepSettings,
    dp_bert_steps,
    one_line,
    spec_from_json,
    sweep_point_steps,
    sweep_report,
)

ROOT = "file:///store"
STEPS = dp_bert_steps(JobSettings(), ROOT)


def _uris(spec: StepSpec) -> list[str]:
    found = [
        v for k, v in spec.model_dump().items() if k.endswith("_uri") and isinstance(v, str) and v
    ]
    results = spec.model_dump().get("results", {})
    return found + [uri for uri in results.values() if isinstance(uri, str)]


@pytest.mark.parametrize("name", list(STEPS))
def test_a_spec_survives_its_journey(name: str) -> None:
    spec = STEPS[name]
    again = spec_from_json(spec.model_dump_json())
    assert again == spec
    assert again.digest() == spec.digest()


@pytest.mark.parametrize("name", list(STEPS))
def test_an_unknown_field_is_refused_by_name(name: str) -> None:
    body = json.loads(STEPS[name].model_dump_json()) | {"surprise": 1}
    with pytest.raises(ValidationError) as refused:
        spec_from_json(json.dumps(body))
    assert "surprise: unknown setting" in one_line(refused.value)


def test_a_job_can_be_run_in_its_own_order() -> None:
    done: set[str] = set()
    for spec in STEPS.values():
        assert set(_uris(spec)) <= done
        done.add(spec.output)
    assert len(done) == len(STEPS)


# These change together with a format, or have no effect on the made-up data of the default job.
ELSEWHERE = {
    "private_path", "private_dataset", "public_path", "entities_train", "entities_test",
    "all_public", "entities_public",
}  # fmt: skip


@pytest.mark.parametrize("field", sorted(set(JobSettings.model_fields) - ELSEWHERE))
def test_every_setting_reaches_a_step_that_it_changes(field: str) -> None:
    """A setting that changed no hash would be answered with another setting's results."""
    changed = {
        "private_format": {
            "private_format": "text", "private_path": "/x", "private_dataset": "notes"
        },
        "public_format": {"public_format": "text", "public_path": "/x"},
        "entities_format": {
            "entities_format": "i2b2", "entities_train": "/x", "entities_test": "/y"
        },
        "unit": {"unit": "document"},
        "data_version": {"data_version": "2"},
        "nonprivate": {"nonprivate": False},
        "canary_patterns": {"canary_patterns": "HHS"},
        "canary_rates": {"canary_rates": "0.5"},
        "device": {"device": "cpu"},
    }  # fmt: skip
    default = JobSettings()
    value = getattr(default, field)
    change = changed.get(field) or {field: value * 2 if value else 7}
    steps = dp_bert_steps(JobSettings.model_validate(default.model_dump() | change), ROOT)
    before = {n: s.digest() for n, s in STEPS.items() if n != "report"}
    after = {n: s.digest() for n, s in steps.items() if n != "report"}
    assert before != after


def test_another_run_of_the_same_work_is_the_same_work() -> None:
    spec = STEPS["vocabulary"]
    assert "run" not in spec.model_dump_json()
    assert RunContext(run_key="a", run_name="b", task="c") != RunContext(
        run_key="d", run_name="b", task="c"
    )


def test_the_points_of_a_sweep_share_what_they_can() -> None:
    settings = SweepSettings(
        sweep_noise_multipliers="1,2", sweep_batch_sizes="64", sweep_epochs="1"
    )
    one, two = (sweep_point_steps(settings, p, ROOT) for p in settings.points())
    own = {"dp_pretraining", "dp_finetuning", "dp_exposure"}
    assert {n for n in one if one[n].output != two[n].output} == own
    assert set(sweep_report(settings, ROOT).results) == {p.name for p in settings.points()}


def test_only_what_is_declared_public_or_made_up_is_shown() -> None:
    private = {"private_format": "text", "private_path": "/x", "private_dataset": "notes"}
    assert JobSettings().made_up
    assert not JobSettings.model_validate(private).made_up
    assert JobSettings.model_validate(private | {"all_public": True}).made_up
    labels = {"entities_format": "i2b2", "entities_train": "/x", "entities_test": "/y"}
    assert not JobSettings.model_validate(labels).made_up
    for more, shown in (({}, False), ({"entities_public": True}, True)):
        steps = dp_bert_steps(JobSettings.model_validate(labels | more), ROOT)
        entities = steps["entities"]
        assert isinstance(entities, EntitiesSpec)
        assert entities.public is shown
