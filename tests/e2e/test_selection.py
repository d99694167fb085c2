import pytest
from small_job import SIZES, folder_of, result_of, run

from dp_core.privacy.ledger import Ledger, State
from dp_core.privacy.mechanisms import MechanismEvent, RandomCountSelection
from dp_core.privacy.private_selection import draw_count
from dp_core.privacy.seed_store import SeedStore
from tasks.protocol.job import job_steps, point_steps
from tasks.protocol.specs import StepSpec
from tasks.protocol.sweep import SweepSettings
from tasks.runtime.deployment import Deployment

pytestmark = pytest.mark.filterwarnings("ignore")  # Warnings of MLflow, SQLAlchemy and TensorFlow.

SETTINGS = SweepSettings(
    selection="random-count", selection_mean=2.0, sweep_noise_multipliers="1,2",
    sweep_batch_sizes="20", sweep_epochs="0.4", delta=1e-5,
    development_share=0.5, **SIZES,
)  # fmt: skip


@pytest.mark.slow
def test_random_count_selection_releases_one_model_with_one_charge(e2e_home):
    deployment = Deployment.from_environment()
    (point,) = SETTINGS.points()
    steps: dict[str, StepSpec] = point_steps(SETTINGS, point)
    steps["report"] = job_steps(SETTINGS)["report"]
    for spec in steps.values():
        assert run(spec) == 0, spec.step
    results = {task: result_of(spec) for task, spec in steps.items()}
    ledger = Ledger.open(deployment.ledger)
    vocabulary, selection = ledger.history("synthetic-notes")
    assert [e.state for e in (vocabulary, selection)] == [State.SETTLED] * 2
    event = selection.event
    assert isinstance(event, RandomCountSelection)
    assert (len(event.candidates), event.eta, event.gamma) == (2, 1.0, 0.5)
    winner = results["pretraining"]
    assert winner.facts["chosen"]["noise_multiplier"] in (1.0, 2.0)
    (release,) = [r for r in winner.releases if r.ledger_id == selection.id]
    assert MechanismEvent.from_json(release.event) == event
    # No PLD of this mechanism is known, so the claim uses the RDP value.
    assert release.epsilon == release.epsilon_rdp
    statement = (folder_of(steps["pretraining"]) / "PRIVACY.md").read_text()
    assert "secret random number of trainings" in statement and "Rényi" in statement
    # The number K of trainings is secret, so no remaining file or figure depends on it.
    seed = SeedStore(deployment.seeds).get(selection.seed_key)
    count = draw_count(event, seed)
    names = [f.name for f in deployment.home.rglob("*") if f.is_file()]
    assert not any("selection-" in name for name in names)
    assert winner.seconds == 0
    assert not any(m.value == count and "count" in m.name for m in winner.metrics)
    assert {m.name for m in winner.metrics} == {
        "mlm_accuracy_public", "mlm_accuracy_private", "mlm_accuracy_development",
        "epsilon", "delta",
    }  # fmt: skip
    headline = {m.name: m.value for m in results["report"].metrics}
    assert headline["points"] == 1
    assert headline["epsilon"] > release.epsilon
