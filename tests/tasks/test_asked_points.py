from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError
from release_examples import bench_of, record
from test_plans import PRIVATE
from test_sweep_costs import PUBLIC_LABELS, specs

from dp_core.errors import BadInput
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.ledger import State
from dp_core.privacy.mechanisms import PoissonGaussian, PrivacyUnit
from tasks.context import StepContext
from tasks.execution import asked_points
from tasks.execution.asked_points import STORAGE, asked_steps, most_steps
from tasks.protocol.job import asked_training, budget_of_run
from tasks.protocol.least_privilege import Need
from tasks.protocol.messages import MetricRecord, StepResult
from tasks.protocol.specs import FinetuneSpec, PretrainSpec, ReportSpec, StepSpec
from tasks.protocol.sweep import SweepSettings
from tasks.releases.charge import charge, planned_release, register_plans, training_plan
from tasks.releases.provenance import PrivateUnits
from tasks.runtime.deployment import Deployment
from tasks.storage.store import Store

ASKED: dict[str, Any] = PUBLIC_LABELS | {
    "sweep_search": "optuna", "sweep_trials": 4, "sweep_noise_multipliers": "1,4",
    "sweep_epochs": "1,2", "sweep_finetune_learning_rates": "1e-4,1e-3",
}  # fmt: skip
SETTINGS = SweepSettings.model_validate(ASKED)
# The event of 6000 declared patients, batches of 60, two epochs and the lowest noise of the space.
COSTLIEST = PoissonGaussian.single(0.01, 1.0, 200, unit=PrivacyUnit.PATIENT)
UNITS = PrivateUnits("notes", PrivacyUnit.PATIENT, 6000, 1, patients=True, origin="x")
Steps = list[tuple[str, str, StepSpec]]


def run(
    deployment: Deployment, steps: Iterator[Any], label: str = "dp", key: str = "run"
) -> Iterator[Any]:
    """Run a simplified version of each step (register, charge or score), and yield the step."""
    store = Store(deployment.store, deployment.cache)
    for step in steps:
        _, _, spec = step
        metrics = []
        if spec.step == "reserve":
            register_plans(bench_of(deployment, run=key), spec.charged)
        if isinstance(spec, PretrainSpec) and spec.mode == "dp":
            charged = charge(
                bench_of(deployment, spec_hash=spec.digest()),
                UNITS,
                planned_release(spec),
                content=spec.digest().encode(),
            )
            charged.settle(b"weights")
        if isinstance(spec, FinetuneSpec):
            f1 = spec.training.learning_rate * 100  # the best value is at the upper end
            metrics = [MetricRecord(name="f1", value=f1, label=label)]
        result = StepResult(
            step=spec.step, spec_hash=spec.digest(), outputs={}, metrics=metrics, facts={}
        )
        store.write(f"{spec.output}/result.json", result.model_dump_json().encode())
        yield step


def of_kind(kind: type[StepSpec], steps: Steps) -> list[Any]:
    of_kind = [s for _, _, s in steps if isinstance(s, kind)]
    return [s for s in of_kind if kind is FinetuneSpec or s.charges]


def test_cost_of_a_search_is_registered_before_the_first_point(ledger, deployment):
    planned = budget_of_run(SETTINGS).charged  # the plan that `ledger cost` shows
    assert [planned_release(spec).event for spec in planned] == [COSTLIEST] * 4
    assert len({spec.digest() for spec in planned}) == 4
    steps = run(deployment, asked_steps(SETTINGS, deployment))
    assert [next(steps)[1] for _ in range(5)][-1] == "reserve"
    entries = ledger.history("notes")
    assert [(e.event, e.state, e.whole_plan) for e in entries] == [
        (COSTLIEST, State.PLANNED, True)
    ] * 4
    spent = ledger.remaining("notes").spent
    done = list(steps)
    assert len(done) + 1 <= most_steps(SETTINGS)
    trainings = {spec.digest(): spec for spec in of_kind(PretrainSpec, done)}
    assert 1 < len(trainings) <= 4
    assert ledger.remaining("notes").spent == spent  # every training used a planned entry
    states = [entry.state for entry in ledger.history("notes")]
    assert states.count(State.SETTLED) == len(trainings) and len(states) == 4
    for spec in trainings.values():
        event, charged = training_plan(spec).event(), planned_release(spec).event
        assert charged == COSTLIEST
        assert epsilon_pld(event, 1e-6) <= epsilon_pld(charged, 1e-6)
        assert 1 <= spec.plan.noise_multiplier <= 4 and 100 <= spec.updates <= 200
        assert Need.CHARGING in spec.needs


def test_each_training_descends_from_the_scores_that_chose_it(ledger, deployment):
    done = list(run(deployment, asked_steps(SETTINGS, deployment)))
    trainings, tuned = of_kind(PretrainSpec, done), of_kind(FinetuneSpec, done)
    assert [spec.asked.number for spec in trainings] == [0, 1, 2, 3]
    for number, (spec, tuning) in enumerate(zip(trainings, tuned, strict=True)):
        assert spec.after == tuning.after == tuple(earlier.output for earlier in tuned[:number])
    report = done[-1][2]
    assert isinstance(report, ReportSpec)
    scores = [uri for name, uri in report.results.items() if name.endswith(" / finetuning")]
    assert scores == [t.output for t in tuned]


def test_total_of_a_later_point_includes_earlier_points(deployment):
    context = StepContext.__new__(StepContext)
    context.store, context.releases = Store(deployment.store, deployment.cache), []
    result = StepResult(
        step="finetune", spec_hash="x", outputs={}, metrics=[], facts={},
        releases=[record("entry", COSTLIEST)],
    )  # fmt: skip
    earlier = f"{deployment.store}/told"
    context.store.write(f"{earlier}/result.json", result.model_dump_json().encode())
    context.descends_from_choice([earlier])
    assert context.releases == result.releases
    with pytest.raises(BadInput, match="no result there"):
        context.descends_from_choice([f"{earlier}-not"])


@pytest.mark.parametrize("stopped_after", [1, 16])
def test_stopped_search_resumes_and_repeated_search_reuses_all_results(
    ledger, deployment, stopped_after
):
    begun = run(deployment, asked_steps(SETTINGS, deployment))
    first = [step for step, _ in zip(begun, range(stopped_after), strict=False)]
    begun.close()
    whole = list(run(deployment, asked_steps(SETTINGS, deployment)))
    assert whole[:stopped_after] == first
    entries = ledger.history("notes")
    assert list(run(deployment, asked_steps(SETTINGS, deployment))) == whole
    (deployment.home / STORAGE).unlink()  # the study can be rebuilt from the results
    assert list(run(deployment, asked_steps(SETTINGS, deployment))) == whole
    assert ledger.history("notes") == entries
    more = SETTINGS.model_copy(update={"sweep_trials": 5})
    again = list(run(deployment, asked_steps(more, deployment), key="another run"))
    assert of_kind(PretrainSpec, again)[:4] == of_kind(PretrainSpec, whole)
    assert len(ledger.history("notes")) == 5
    # Another search shares no entry with this one, so its cost is also known before it starts.
    other = SETTINGS.model_copy(update={"sweep_finetune_learning_rates": "1e-4,1e-2"})
    digests = {spec.digest() for spec in budget_of_run(other).charged}
    assert digests.isdisjoint(spec.digest() for spec in budget_of_run(SETTINGS).charged)


def test_search_moves_towards_better_scores(ledger, deployment):
    free = ASKED | {"sweep_noise_multipliers": "2", "sweep_epochs": "1", "sweep_trials": 24}
    settings = SweepSettings.model_validate(free | {"delta": 1e-9})
    done = list(run(deployment, asked_steps(settings, deployment)))
    rates = [spec.training.learning_rate for spec in of_kind(FinetuneSpec, done)]
    assert min(rates) < 5e-4 and sum(rates[12:]) / 12 > sum(rates[:10]) / 10
    # the trials share one training, and no other release is registered
    assert len({spec.digest() for spec in of_kind(PretrainSpec, done)}) == 1
    assert [entry.state for entry in ledger.history("notes")] == [State.SETTLED]
    assert len(done) == most_steps(settings)


def test_search_refuses_scores_for_the_operator(ledger, deployment):
    steps = run(deployment, asked_steps(SETTINGS, deployment), label="operator")
    with pytest.raises(BadInput, match="f1 is the operator's"):
        list(steps)
    import optuna

    storage = f"sqlite:///{deployment.home / STORAGE}"
    (name,) = optuna.get_all_study_names(storage)
    (trial,) = optuna.load_study(study_name=name, storage=storage).trials
    assert trial.value is None


@pytest.mark.cases
def test_training_that_costs_more_than_its_charge_is_refused(change, reason):
    spec = asked_training(SETTINGS, SETTINGS.costliest, 0)
    assert spec.charged_as == spec
    content = spec.model_dump()
    for name, value in change.items():
        content[name] = content[name] | value if isinstance(value, dict) else value
    with pytest.raises(ValidationError, match=reason):
        PretrainSpec.model_validate(content)


@pytest.mark.parametrize("clipping", ["flat", "automatic", "adaptive"])
def test_no_proposed_training_costs_more_than_the_charge(clipping):
    """With adaptive clipping, the compared σ includes the noise of the clipped counts."""
    settings = SweepSettings.model_validate(ASKED | {"clipping": clipping})
    charged = training_plan(asked_training(settings, settings.costliest, 0)).event()
    for sigma in (1.0, 1.7, 4.0):
        for epochs in (1.0, 1.3, 2.0):
            point = settings.asked_point({"noise_multiplier": sigma, "epochs": epochs,
                                          "finetune_learning_rate": 1e-3})  # fmt: skip
            proposed = training_plan(asked_training(settings, point, 1)).event()
            for delta in (1e-3, 1e-6, 1e-9):
                assert epsilon_pld(proposed, delta) <= epsilon_pld(charged, delta)


def test_training_outside_a_search_keeps_its_hash():
    """A changed hash would charge the training again after an upgrade."""
    (spec,) = specs(PretrainSpec, **PUBLIC_LABELS)
    assert spec.asked is None and not {"asked", "after"} & spec.hashed().keys()
    assert spec.charged_as is spec
    assert PRIVATE["private_dataset"] == spec.plan.dataset


@pytest.mark.parametrize("name", ["feature%2Fx", "why?", "Zürich #1"])
def test_study_is_stored_in_a_home_folder_of_any_name(name, tmp_path):
    deployment = Deployment.from_environment({"CONFIDE_HOME": str(tmp_path / name)})
    asked_points._study(SETTINGS, deployment)
    assert (tmp_path / name / STORAGE).stat().st_size > 0
    assert [folder.name for folder in tmp_path.iterdir()] == [name]
