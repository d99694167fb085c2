"""Whose releases a page counts, whatever a job leaves out or a spec by hand calls its parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from release_examples import UNIT, record

from dp_core.labels import Label
from dp_core.privacy.mechanisms import PoissonGaussian, Unaccounted
from tasks.context import StepContext
from tasks.execution import contract
from tasks.protocol import EXACT_WORDS, CanariesSpec, ReleaseRecord, StepResult, SweepPoint
from tasks.protocol.specs import SweepReportSpec
from tasks.report import results, sweep_results
from tasks.results.inputs import Input
from tasks.runtime.deployment import Deployment
from tasks.steps import sweep_report_step as sweep_report
from tasks.storage import encode_data

EVENT = PoissonGaussian.single(0.1, 4.0, 3, unit=UNIT)
WORDS, PHRASES, TRAINED, OTHER = (
    record(name, EVENT) for name in ("words", "phrases", "trained", "other")
)
USED = record("used", Unaccounted("training without privacy", unit=UNIT))
EXACT = record("exact", Unaccounted(EXACT_WORDS, unit=UNIT))


def output(*releases: ReleaseRecord, **facts: Any) -> Input:
    result = StepResult(
        step="pretrain", spec_hash="a", outputs={}, metrics=[], releases=list(releases), facts=facts
    )
    return Input(result, Path())


def ids(releases: Sequence[ReleaseRecord]) -> list[str]:
    return [release.ledger_id for release in releases]


def test_phrases_that_no_private_training_begins_with_are_in_the_jobs_total() -> None:
    """With private_start=fresh the page shows a model of phrases beside one without them."""
    job = {
        "public_pretraining": output(WORDS),
        "phrases_pretraining": output(WORDS, PHRASES),
        "dp_pretraining": output(WORDS, TRAINED),
        "nonprivate_pretraining": output(WORDS, USED),
        "nonprivate_finetuning": output(WORDS, USED),
    }
    assert ids(results.released_by_job(job)) == ["words", "phrases", "trained"]


def test_what_a_baseline_shows_to_anyone_is_counted_whatever_it_began_with() -> None:
    """A spec by hand puts a released fine-tuning behind a training without privacy."""
    point = SweepPoint(noise_multiplier=0, batch_size=0, epochs=1, baseline="nonprivate-training")
    found = {
        "vocabulary": output(WORDS),
        "pretraining": output(WORDS, USED),
        "finetuning": output(WORDS, OTHER),
    }
    uris = {task: task for task in found}
    spec = SweepReportSpec(
        made_up=False, title="dp_sweep", points={"p": point}, results={"p": uris}, readers={},
        settings={},
    )  # fmt: skip
    assert ids(sweep_results.released_by_sweep(spec, {"p": found})) == ["words", "other"]

    class Told(StepContext):
        def __init__(self) -> None:
            self.releases: list[ReleaseRecord] = []

        def beside(self, uri: str) -> Input:
            return found[uri]

    context = Told()
    assert sweep_report._opened(spec, context, "p") == found
    assert ids(context.releases) == ["words", "other"]


@pytest.mark.parametrize(
    ("release", "label"), [(WORDS, Label.DP), (EXACT, Label.OPERATOR)], ids=["released", "exact"]
)
def test_how_large_a_model_is_tells_how_many_tokens_there_are(
    release: ReleaseRecord, label: Label
) -> None:
    """Of exact counts that fill no table, the number of parameters is a private count."""
    plan = {
        "schedule": [{"steps": 1, "expected_batch": 8}], "declared_units": 40,
        "sampling": {"kind": "poisson"}, "strategy": {"coefficients": [1]},
        "noise_multiplier": 4.0, "clip_norm": 1.0,
    }  # fmt: skip
    model = output(release, plan=plan, parameters=77, trained={"which": "all", "parameters": 77})
    shown = {fact.name: fact.label for fact in results._training_facts(model)}
    assert shown["Parameters"] == shown["Parameters trained"] == label
    assert math.isinf(release.epsilon) == (label is Label.OPERATOR)


class PanicException(BaseException):
    """What a library in Rust raises: no `Exception`."""


def test_the_words_of_a_panic_are_not_said(
    deployment: Deployment,
    no_mlflow: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Step:
        def run(self, *_: object) -> None:
            raise PanicException("byte 3 is inside 'é' of `Quendoline has it`")

    monkeypatch.setenv("CONFIDE_HOME", str(deployment.home))
    monkeypatch.delenv("CONFIDE_DEBUG", raising=False)
    monkeypatch.setattr(contract, "_module", lambda _: cast(Any, Step()))
    spec = CanariesSpec.model_validate(
        {"made_up": False, "seed": 1, "vocabulary_uri": "v"} | {"config": {}}
    )
    code = contract.main("canaries", encode_data(spec.model_dump_json().encode()))
    said = "".join(capfd.readouterr())
    assert code == 1 and "PanicException at tests/tasks/test_across_rooms.py" in said
    assert "Quendoline" not in said
