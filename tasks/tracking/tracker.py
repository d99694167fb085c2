"""The tracker of a step writes its numbers, settings and results to the event log.

The events are delivered to MLflow without waiting. Events that MLflow does not accept now stay on
disk and are delivered later.
"""

import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from dp_core.labels import Labelled
from tasks.protocol.messages import StepResult, TrackedAt
from tasks.protocol.specs import StepSpec
from tasks.results import MODEL_RUNS, STATEMENT_WORDS, of_last_model
from tasks.runtime.deployment import Deployment
from tasks.runtime.log import log, send
from tasks.storage.store import Store
from tasks.tracking import event_log, mlflow

PATIENCE = 30.0  # seconds between attempts to reach an MLflow that is down
EVERY = 5.0  # seconds between deliveries of a step that is running
# The numbers that compare models; all others are shown in the run of their step.
_OF_MODEL = re.compile(
    r"(epsilon|delta)(/.*)?|f1|accuracy|(mlm_accuracy|perplexity)_(public|private|development)|exposure"
)

# Fields of a spec that are no parameters: other steps and their sources, and settings of the run.
_NOT_SHOWN = {"settings", "results", "points", "charged", "reads", "private_paths"}


class Tracker:
    """A step's runs in MLflow. Every call returns at once, even if MLflow is unreachable.

    Args:
        deployment: the deployment that MLflow belongs to.
        identity: of the step in its run.
    """

    def __init__(self, deployment: Deployment, identity: event_log.Identity) -> None:
        self._identity, self._deployment = identity, deployment
        self.events = event_log.EventLog.of(deployment.events, identity)
        self._delivery = mlflow.Delivery(deployment)
        self._next, self._down = 0.0, False

    def begin(self, *, follows_run: bool = False) -> None:
        """Mark the job and the step as running, even if an earlier attempt ended them.

        Args:
            follows_run: the step runs after the job's last step. The job stays as it ended,
                because no later step would end it again.
        """
        self.events.take_over(self._deployment.events)
        self._add(*([] if follows_run else [event_log.Begun(target="parent")]), event_log.Begun())

    def measure(self, name: str, value: Labelled, step: int = 0) -> None:
        """Record a number; the type of its label decides which experiment shows it.

        Raises:
            TypeError: the number has no label.
        """
        self._add(event_log.metric(name, value, step))

    def tag(self, name: str, value: str) -> None:
        """Record a short public text about the step's output."""
        self._add(event_log.Tag(name=name, value=value))

    def record(
        self, spec: StepSpec, store: Store, result: StepResult, *, done_before: bool
    ) -> None:
        """Record the settings of the spec, and the numbers and files of the result.

        Args:
            spec: of the step.
            store: the store that holds the result's files.
            result: of the step.
            done_before: this run measured nothing, so its numbers come from the earlier result.
        """
        model = bool(self._identity.model)
        events: list[event_log.Event] = []
        private = {source.uri for source in spec.sources if not source.public}
        settings = _flat(spec.model_dump(mode="json", exclude=_NOT_SHOWN))
        events += self._params({n: value for n, value in settings.items() if value not in private})
        events += self._params(spec.run_settings, "parent")
        if model:
            events += self._params(spec.coordinates, "model")
        if done_before:
            # So that no other process removes the log before its end.
            self.events.append(event_log.Begun())
            events += [event_log.Metric(**dict(number)) for number in result.metrics]
        above: event_log.Target | None = "parent" if spec.ends_run else "model" if model else None
        if above:
            last = {
                n.name: n for n in result.metrics if spec.ends_run or _OF_MODEL.fullmatch(n.name)
            }
            events += [
                event_log.Metric(**dict(event_log.rounded(n)), target=above) for n in last.values()
            ]
        if spec.step == "report":  # the folder of the operator's edition also has private numbers
            for row in json.loads((store.local_copy(spec.output) / MODEL_RUNS).read_text()):
                events += self.shown(row)
        events += [
            event_log.ChargedDataset(name=release.dataset, ledger_id=release.ledger_id)
            for release in result.releases
        ]
        if result.facts["artifacts"]:
            folder = store.local_copy(spec.output)
            # The last step also shows its files on the job's page.
            targets: list[event_log.Target] = ["step", "parent"] if spec.ends_run else ["step"]
            for file, label in result.facts["artifacts"].items():
                kept, under = self.events.keep(folder / file), file.rpartition("/")[0]
                events += [
                    event_log.LoggedArtifact(target=t, file=kept, label=label, folder=under)
                    for t in targets
                ]
        if not self._identity.hides_count:  # the registry's versions carry public time stamps
            models = (judged for judged in result.facts.get("judged", ()) if judged["model"])
            events += [self._model(judged, store) for judged in models]
        self._add(*events)

    def end(
        self,
        status: event_log.Status,
        *,
        also: tuple[event_log.Target, ...] = (),
        closed: bool = True,
        refused: bool = False,
        contradicted: bool = False,
    ) -> None:
        """End the step's run, deliver all events, and send the run's address to the launcher.

        Remaining events of earlier steps are delivered first: the job must not end before them.

        Args:
            status: MLflow's status of the ended run.
            also: `model` or `parent`, if this step was its last one.
            closed: no state is left for a further attempt to continue from.
            refused: the step did nothing, because of its settings, data or budget.
            contradicted: the step failed because of a verdict, which is public.
        """
        self._next = 0.0
        self.deliver()
        if not self._down:
            mlflow.send_all(self._deployment)
        ended = {"refused": refused, "contradicted": contradicted}
        self.leave(status, also=also, closed=closed, **ended)
        if not self._down:
            self._next = 0.0
        self.deliver()
        if self._down:
            return
        with suppress(mlflow.TrackingDown):
            if url := self._delivery.url(self._identity, "step"):
                send(TrackedAt(url=url))  # Airflow shows it as a button
                log(f"MLflow: {url}?{mlflow.TRAINING_VIEW}")

    def leave(self, status: event_log.Status, **ended: Any) -> None:
        """End the runs like `end`, on disk only, for a process without time to reach MLflow."""
        self.events.append(event_log.AttemptEnded(status=status, **ended))

    @property
    def shown_run(self) -> str:
        """The run's key as the public experiment shows it."""
        return mlflow.shown_key(self._identity, mlflow.PUBLIC)

    def _params(
        self, values: dict[str, Any], target: event_log.Target = "step"
    ) -> list[event_log.Event]:
        """Return settings, which are public, as events."""
        words = {name: f"{v:g}" if isinstance(v, float) else str(v) for name, v in values.items()}
        return [
            event_log.Param(target=target, name=name, value=value) for name, value in words.items()
        ]

    def shown(self, shown: dict[str, Any]) -> Iterator[event_log.Event]:
        """Yield the row of a model in MLflow's list (`tasks/report/models_table.py`)."""
        of_model: dict[str, Any] = {"target": "model", "model": shown["model"]}
        for number in shown["numbers"]:
            yield event_log.Metric(**{**number, **of_model})
        yield event_log.Tag(name=event_log.VERDICT, value=shown["verdict"], **of_model)
        yield event_log.ModelShown(
            name=shown["name"],
            description=shown["description"],
            replicates=shown["replicates"],
            holds_job=shown["holds_job"],
            status="FAILED" if shown["verdict"] in mlflow.AGAINST else "FINISHED",
            **of_model,
        )

    def _model(self, judged: dict[str, Any], store: Store) -> event_log.LoggedModel:
        """Return the registration of a model with its verdict (`tasks/evidence/audits.py`)."""
        folder = store.local_copy(judged["uri"])
        # Not every file: in a local store the folder also holds the operator's numbers.
        files = [folder / name for name in of_last_model(store.digests(judged["uri"]))]
        (statement,) = (file.read_text() for file in files if file.name == STATEMENT_WORDS)
        return event_log.LoggedModel(
            name=judged["model"],
            files=[self.events.keep(file) for file in files],
            folder=f"model/{judged['tags']['confide.spec_hash'][:16]}",
            description=f"{judged['sentence']}\n\n{statement}"[:4000],
            tags=judged["tags"],
            alias=mlflow.ALIAS if judged["promoted"] else "",
        )

    def _add(self, *events: event_log.Event) -> None:
        self.events.append(*events)
        self.deliver()

    def deliver(self) -> None:
        """Deliver new events, unless a delivery or a failure was a moment ago."""
        if time.monotonic() < self._next:
            return
        try:
            self._delivery.deliver(self.events)
            self._next, self._down = time.monotonic() + EVERY, False
        except mlflow.TrackingDown as error:
            log(f"tracking is down ({error}): kept on disk, sent later", "warning")
            self._next, self._down = time.monotonic() + PATIENCE, True


def _flat(values: dict[str, Any], above: str = "") -> dict[str, bool | int | float | str]:
    flat: dict[str, bool | int | float | str] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{above}{name}.")
        elif isinstance(value, bool | int | float | str):
            flat[f"{above}{name}"] = value
        else:
            flat[f"{above}{name}"] = json.dumps(value)
    return flat
