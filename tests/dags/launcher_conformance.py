"""Conformance tests for every launcher: command, outcomes, privileges and cleanup."""

import base64
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

from dags.launcher.step_operator import NamedSteps, StepOperator
from tasks.protocol.job import job_steps, point_steps
from tasks.protocol.least_privilege import WITHHELD
from tasks.protocol.messages import Failed, Message, StepProgress, TrackedAt
from tasks.protocol.points import first_private
from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import Need, RunContext, StepSpec
from tasks.protocol.step_classes import spec_from_json
from tasks.protocol.step_process import Work

PASSWORD, READER = "hunter2", "looks-only"
LEDGER = f"postgresql://ledger:{PASSWORD}@db/ledger"
LEDGER_READER = f"postgresql://ledger_reader:{READER}@db/ledger"
SEEDS, DATA = "confide_seeds", "/srv/notes"
ROOT = "gs://bucket/store"
URL = "http://127.0.0.1:5000/#/experiments/1/runs/ab12"
HOSTILE = ["; touch here", "$(touch here)", "`touch here`", "\n--spec\nx", "' || touch here '"]
# Settings of a job that reads every input from outside, including a public model.
SETTINGS = JobSettings(
    private_format="text",
    private_path="/data/notes",
    private_dataset="ward-notes",
    public_format="text",
    public_path="/data/wiki",
    entities_format="columns",
    entities_train="/data/train",
    entities_test="/data/test",
    public_model="/data/model",
)
Outcome = tuple[int, list[Message]]  # exit code, and the step's messages before it


def plan(params: Mapping[str, Any], point: Any) -> dict[str, StepSpec]:
    """Return the shared steps of a job and the steps of its model with DP, by task."""
    settings = JobSettings.model_validate(dict(params))
    of_run = {name: spec for name, spec in job_steps(settings).items() if " / " not in name}
    return of_run | point_steps(settings, first_private(settings.points()))


JOB = plan(SETTINGS.model_dump(), None)
PHRASES = plan({"phrases_epsilon": 2.0}, None)


def context_of(params: Mapping[str, Any] | None = None, run_id: str = "manual__1") -> Any:
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    run = SimpleNamespace(dag_id="dp_bert", run_id=run_id, start_date=now, run_after=now)
    run.logical_date = None
    ti = SimpleNamespace(dag_id="dp_bert", task_id="vocabulary", run_id=run_id)
    ti.map_index, ti.try_number, ti.xcom_push = -1, 1, lambda **_: None
    return {"params": params or {}, "dag_run": run, "ti": ti, "dag": None, "run_id": run_id}


def work(spec: StepSpec, *, run_key: str = "dp_bert/1", task: str = "task") -> Work:
    return Work(spec, RunContext(run_key=run_key, run_name="a run", task=task))


class LauncherConformance:
    """Tests inherited by each launcher's test class, which implements the methods below."""

    @pytest.fixture(autouse=True)
    def _deployment(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for name, value in {
            "CONFIDE_HOME": str(tmp_path / "home"),
            "CONFIDE_LEDGER": LEDGER,
            "CONFIDE_LEDGER_READER": LEDGER_READER,
            "CONFIDE_STORE": ROOT,
            "CONFIDE_CACHE_BYTES": "5g",
            "CONFIDE_DOCKER_MOUNTS": "home:/var/lib/confide confide_keys:/var/lib/confide/keys:ro",
            "CONFIDE_DOCKER_SEEDS": f"{SEEDS}:/var/lib/confide-seeds",
            "CONFIDE_DOCKER_SOURCES": f"{DATA}:/data",
            "CONFIDE_DOCKER_CLUSTER": "cluster:/var/lib/confide-cluster",
            "AIRFLOW__CORE__FERNET_KEY": "a key",
            "MPLBACKEND": "module://of_a_notebook",
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("CONFIDE_POD_TEMPLATES", raising=False)

    # --- methods that a launcher's tests implement

    def operator(self, **options: Any) -> StepOperator:
        raise NotImplementedError

    def asked(self, of: Work, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], dict[str, str]]:
        """Return the arguments after the interpreter and the variables that the work receives."""
        raise NotImplementedError

    def run(
        self, operator: StepOperator, outcomes: list[Outcome], monkeypatch: pytest.MonkeyPatch
    ) -> dict[str, Any]:
        """Run the task with steps that have these outcomes in turn; return the task's result."""
        raise NotImplementedError

    @property
    def passwords_by_name(self) -> bool:
        """Whether secrets are passed by name only, and not as values of variables."""
        return False

    # --- outcomes

    def test_a_finished_step_answers_with_its_output_and_its_run(self, monkeypatch):
        operator = self.operator()
        messages = [TrackedAt(url=URL), StepProgress(done=2, total=2)]
        answer = self.run(operator, [(0, messages)], monkeypatch)
        assert answer["outputs"] == [plan({}, None)["vocabulary"].output]
        assert operator.tracked_at == URL

    @pytest.mark.cases
    def test_bad_input_and_an_exceeded_budget_alone_are_not_tried_again(
        self, code, words, never_again, monkeypatch
    ):
        operator = self.operator()
        messages = [TrackedAt(url=URL), Failed(exit_code=code, reason="what is wrong")]
        with pytest.raises(AirflowException, match=rf"^what is wrong \(.*{words}") as raised:
            self.run(operator, [(code, messages)], monkeypatch)
        assert isinstance(raised.value, AirflowFailException) is never_again
        assert operator.tracked_at == URL  # a failed step also has an MLflow run

    def test_a_step_that_ended_without_a_word_is_said_so(self, monkeypatch):
        with pytest.raises(AirflowException, match="it ended without a word"):
            self.run(self.operator(), [(1, [StepProgress(done=1, total=2)])], monkeypatch)

    def test_step_that_reached_its_time_limit_continues_within_the_same_try(self, monkeypatch):
        outcomes: list[Outcome] = [(75, []), (75, []), (0, [TrackedAt(url=URL)])]
        answer = self.run(self.operator(), outcomes, monkeypatch)
        assert outcomes == []
        assert answer["outputs"][0].startswith("store://")

    def test_steps_of_one_task_run_in_their_order(self, monkeypatch):
        names = ["phrases", "phrases_store", "written_text"]
        operator = self.operator(named=NamedSteps(name="x", steps=[(n, None) for n in names]))
        outcomes: list[Outcome] = [(0, []), (75, []), (0, []), (0, [TrackedAt(url=URL)])]
        monkeypatch.setattr(operator, "plan", lambda *_: PHRASES)
        answer = self.run(operator, outcomes, monkeypatch)
        assert outcomes == []
        assert answer["outputs"] == [PHRASES[name].output for name in names]
        assert operator.tracked_at == URL

    def test_a_step_that_the_settings_switch_off_is_skipped(self):
        operator = self.operator()
        operator.task_id = "membership"
        with pytest.raises(AirflowSkipException):
            operator.execute(context_of({"membership_units": 0}))

    # --- arguments and variables

    @pytest.mark.parametrize("path", HOSTILE)
    def test_the_command_is_a_list_of_the_same_words_whatever_a_form_holds(self, path, monkeypatch):
        settings = SETTINGS.model_dump() | {"private_path": f"/data/{path}"}
        spec = job_steps(JobSettings.model_validate(settings))["private_corpus"]
        words, _ = self.asked(work(spec, run_key=f"dp_bert/{path}/../../x"), monkeypatch)
        assert words[:4] == ["-m", "tasks", "corpus", "--spec"]
        assert len(words) == 5
        assert spec_from_json(base64.b64decode(words[4].partition(",")[2])) == spec

    @pytest.mark.cases
    def test_only_steps_that_need_the_cluster_know_its_address(self, task, monkeypatch):
        names = ("CONFIDE_CLUSTER", "CONFIDE_CLUSTER_SECRETS", "CONFIDE_HOSTS")
        for name, value in zip(names, ("ray-head:6379", "/secrets", "2"), strict=True):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("CONFIDE_LEDGER_READER", LEDGER_READER)
        _, variables = self.asked(work(JOB[task]), monkeypatch)
        needed = task not in ("private_corpus", "report")
        assert [name in variables for name in names] == [needed] * 3
        monkeypatch.setenv("CONFIDE_CLUSTER", "in-process")
        monkeypatch.delenv("CONFIDE_HOSTS")
        _, variables = self.asked(work(JOB[task]), monkeypatch)
        assert variables["CONFIDE_CLUSTER"] == "in-process"
        assert "CONFIDE_CLUSTER_SECRETS" not in variables

    @pytest.mark.parametrize("task", sorted(JOB))
    def test_step_receives_only_the_variables_that_it_needs(self, task, monkeypatch):
        spec = JOB[task]
        held, (_, variables) = spec.needs, self.asked(work(spec), monkeypatch)
        assert variables["CONFIDE_MESSAGES"]
        assert variables["CONFIDE_CACHE_BYTES"] == "5g"
        assert RunContext.model_validate_json(variables["CONFIDE_RUN_CONTEXT"]).task == "task"
        assert not [name for name in variables if name.startswith(("AIRFLOW", "MPL"))]
        assert "CONFIDE_LEDGER_READER" not in variables
        if Need.CHARGING in held:
            assert variables.get("CONFIDE_SEEDS", "") != WITHHELD
            if not self.passwords_by_name:
                assert variables["CONFIDE_LEDGER"] == LEDGER
            return
        assert PASSWORD not in str(variables)
        assert variables["CONFIDE_SEEDS"] == WITHHELD
        if Need.LEDGER not in held:
            assert variables["CONFIDE_LEDGER"] == f"sqlite:///{WITHHELD}"
        elif not self.passwords_by_name:
            assert variables["CONFIDE_LEDGER"] == LEDGER_READER


class IsolatedLauncherConformance(LauncherConformance):
    """Additional tests of launchers that isolate a step from this machine."""

    # The privileges for which the launcher has volumes or secrets.
    grants = frozenset({Need.CHARGING, Need.CLUSTER})

    def granted(self, of: Work, monkeypatch: pytest.MonkeyPatch) -> set[Need]:
        """Return the privileges whose volumes or secrets the work receives."""
        raise NotImplementedError

    @pytest.mark.parametrize("place", ["ray-head:6379", "local:2", "pool", ""])
    def test_step_receives_only_the_volumes_and_secrets_that_it_needs(self, place, monkeypatch):
        """Only a cluster of other machines has secrets."""
        monkeypatch.setenv("CONFIDE_CLUSTER", place)
        withheld = set() if place.endswith(":6379") else {Need.CLUSTER}
        for task, spec in JOB.items():
            needed = (spec.needs - withheld) & self.grants
            assert self.granted(work(spec), monkeypatch) == needed, task
