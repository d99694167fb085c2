import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from release_examples import UNIT, record

from dp_core.config.release import EXACT_WORDS, ReleaseRecord
from dp_core.labels import Label
from dp_core.privacy.mechanisms import PoissonGaussian, Unaccounted
from tasks.context import StepContext
from tasks.execution import contract
from tasks.protocol.job import names_of
from tasks.protocol.messages import StepResult
from tasks.protocol.points import Point
from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import CanariesSpec, ReportSpec
from tasks.protocol.step_process import data_uri
from tasks.report import job_results
from tasks.results import Input
from tasks.steps import report_step

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


def test_released_phrases_count_in_the_total_without_a_training_that_uses_them():
    """With private_start=fresh, the report shows a model of phrases and a model without phrases."""
    settings = JobSettings(phrases_epsilon=1.0, private_start="fresh")
    trained = ([WORDS], [WORDS, PHRASES], [WORDS, TRAINED], [WORDS, USED])
    models = {point.name: point for point in settings.points()}
    spec = ReportSpec(made_up=False, title="dp_bert", points=models, results={}, settings={})
    points = {
        name: {"pretraining": output(*releases), "finetuning": output(*releases)}
        for name, releases in zip(models, trained, strict=True)
    }
    assert ids(job_results.released_by(spec, points)) == ["words", "phrases", "trained"]


def test_private_finetuning_of_a_nonprivate_baseline_counts_in_the_total():
    """A spec written by hand runs a private fine-tuning after a training without privacy."""
    point = Point(noise_multiplier=0, batch_size=0, epochs=1, baseline="nonprivate-training")
    outputs = {
        "vocabulary": output(WORDS),
        "pretraining": output(WORDS, USED),
        "finetuning": output(WORDS, OTHER),
    }
    uris = {names_of(point)[task]: task for task in outputs}
    spec = ReportSpec(
        made_up=False, title="dp_sweep", points={"p": point}, results=uris, settings={}
    )
    assert ids(job_results.released_by(spec, {"p": outputs})) == ["words", "other"]

    class Context(StepContext):
        def __init__(self) -> None:
            self.releases: list[ReleaseRecord] = []

        def beside(self, uri: str) -> Input:
            return outputs[uri]

    context = Context()
    assert report_step._opened(spec, context, "p") == outputs
    assert ids(context.releases) == ["words", "other"]


@pytest.mark.parametrize(
    ("release", "label"), [(WORDS, Label.DP), (EXACT, Label.OPERATOR)], ids=["released", "exact"]
)
def test_parameter_counts_are_labelled_like_the_vocabulary_they_depend_on(release, label):
    """With exact counts, the number of parameters reveals the private size of the vocabulary."""
    plan = {
        "schedule": [{"steps": 1, "expected_batch": 8}], "declared_units": 40,
        "sampling": {"kind": "poisson"}, "strategy": {"coefficients": [1]},
        "noise_multiplier": 4.0, "clip_norm": 1.0,
    }  # fmt: skip
    model = output(release, plan=plan, parameters=77, trained={"which": "all", "parameters": 77})
    shown = {fact.name: fact.label for fact in job_results._training_facts(model)}
    assert shown["Parameters"] == shown["Parameters trained"] == label
    assert math.isinf(release.epsilon) == (label is Label.OPERATOR)


class PanicException(BaseException):
    """A panic of a library in Rust, which is not an `Exception`."""


def test_message_of_a_panic_is_not_printed(deployment, no_mlflow, monkeypatch, capfd):
    class Step:
        def run(self, *_: object) -> None:
            raise PanicException("byte 3 is inside 'é' of `Quendoline has it`")

    monkeypatch.setenv("CONFIDE_HOME", str(deployment.home))
    monkeypatch.delenv("CONFIDE_DEBUG", raising=False)
    monkeypatch.setattr(contract, "_module", lambda _: cast(Any, Step()))
    spec = CanariesSpec.model_validate(
        {"made_up": False, "seed": 1, "vocabulary_uri": "v"} | {"config": {}}
    )
    code = contract.main("canaries", data_uri(spec.model_dump_json().encode()))
    output = "".join(capfd.readouterr())
    assert code == 1 and "PanicException at tests/tasks/test_counted_releases.py" in output
    assert "Quendoline" not in output
