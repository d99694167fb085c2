"""The tracker of a step: what the step, its spec and its result say of the run, as events.

It is told to MLflow as it comes, and without waiting: what MLflow does not take now stays on disk.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

from dp_core.labels import Labelled
from tasks.protocol import StepResult, StepSpec
from tasks.protocol.messages import TrackedAt
from tasks.results.inputs import labelled
from tasks.results.statements import WORDS, of_last_model
from tasks.runtime.deployment import Deployment
from tasks.runtime.log import log, send
from tasks.storage import Store
from tasks.tracking.event_log import (
    Artifact,
    Begun,
    Dataset,
    Ended,
    Event,
    EventLog,
    Identity,
    Model,
    Param,
    Status,
    Tag,
    Target,
    metric,
)
from tasks.tracking.mlflow import ALIAS, PUBLIC, Delivery, TrackingDown, send_all, shown_key

PATIENCE = 30.0  # seconds between attempts to reach an MLflow that is down
EVERY = 5.0  # seconds between deliveries of a step that is running


class Tracker:
    """A step's runs in MLflow; every call returns at once, whether MLflow is there or not.

    Args:
        deployment: whose MLflow it is.
        identity: of the step in its run.
    """

    def __init__(self, deployment: Deployment, identity: Identity) -> None:
        self._identity, self._deployment = identity, deployment
        self.events = EventLog.of(deployment.events, identity)
        self._own = identity.key("step")
        self._delivery = Delivery(deployment)
        self._next, self._down = 0.0, False

    def begin(self) -> None:
        """Mark the run and the step as running, also when an earlier attempt ended them."""
        self._add(Begun(run=self._own, target="parent"), Begun(run=self._own))

    def measure(self, name: str, value: Labelled, step: int = 0) -> None:
        """Record a number of the work; its label's type says who sees it.

        Raises:
            TypeError: a number without a label.
        """
        self._add(metric(name, value, step))

    def tag(self, name: str, value: str) -> None:
        """Record a word or two, for anyone, about what the work made."""
        self._add(Tag(name=name, value=value))

    def record(
        self, spec: StepSpec, store: Store, result: StepResult, *, done_before: bool
    ) -> None:
        """Record what the result and the spec say of this run, and which files to show.

        Args:
            spec: of the step.
            store: that holds the result's files.
            result: of the step.
            done_before: nothing was measured by this run: its numbers are the result's.
        """
        model = bool(self._identity.model)
        events: list[Event] = []
        told = spec.model_dump(mode="json", exclude={"settings", "results", "points", "charged"})
        events += self._params(_flat(told))
        events += self._params(spec.run_settings, "parent")
        if model:
            events += self._params(spec.coordinates, "model")
        if done_before:
            events += [metric(m.name, labelled(m), m.step, run=self._own) for m in result.metrics]
        above: Target | None = "parent" if spec.ends_run else "model" if model else None
        if above:
            events += [
                metric(m.name, labelled(m), m.step, target=above, run=self._own)
                for m in {m.name: m for m in result.metrics}.values()
            ]
        events += [
            Dataset(run=self._own, name=release.dataset, ledger_id=release.ledger_id)
            for release in result.releases
        ]
        if result.facts["artifacts"]:
            folder = store.local_copy(spec.output)
            # On the job's own page too, where the step is its last.
            targets: list[Target] = ["step", "parent"] if spec.ends_run else ["step"]
            for file, label, under in result.facts["artifacts"]:
                kept = self.events.keep(folder / file)
                events += [
                    Artifact(run=self._own, target=t, file=kept, label=label, folder=under)
                    for t in targets
                ]
        if not self._identity.hides_count:  # the registry stamps versions, and has no experiments
            models = (judged for judged in result.facts.get("judged", ()) if judged["model"])
            events += [self._model(judged, store) for judged in models]
        self._add(*events)

    def end(self, status: Status, *, also: tuple[Target, ...] = (), closed: bool = True) -> None:
        """End the step's run, and deliver everything.

        Args:
            status: MLflow's word for how it ended.
            also: `model` or `parent`, when this step was its last.
            closed: nothing is left that a further attempt would go on from.
        """
        self._next = 0.0
        if "parent" in also:  # of the whole job: what was left behind comes before
            self.deliver()
            self.send_left_behind()
        self.leave(status, also=also, closed=closed)
        if not self._down:
            self._next = 0.0
        self.deliver()

    def leave(self, status: Status, *, also: tuple[Target, ...] = (), closed: bool = True) -> None:
        """End the runs, as `end`, on disk only: the process has no time to reach anybody."""
        self.events.append(Ended(run=self._own, status=status, also=also, closed=closed))

    def send_left_behind(self) -> None:
        """Deliver what earlier steps could not, if MLflow answers now."""
        if not self._down:
            send_all(self._deployment)

    def send_address(self) -> None:
        """Tell whoever started the step where its run is: Airflow makes a button of it."""
        if self._down:
            return
        with suppress(TrackingDown):
            if url := self._delivery.url(self._identity, "step"):
                send(TrackedAt(url=url))
                log(f"MLflow: {url}")

    @property
    def shown_run(self) -> str:
        """The run's key, as anyone may know it."""
        return shown_key(self._identity, PUBLIC)

    def _params(self, values: dict[str, Any], target: Target = "step") -> list[Event]:
        """Return settings, which are public, as events."""
        words = {name: f"{v:g}" if isinstance(v, float) else str(v) for name, v in values.items()}
        return [
            Param(run=self._own, target=target, name=name, value=value)
            for name, value in words.items()
        ]

    def _model(self, judged: dict[str, Any], store: Store) -> Model:
        """Return the registration of a model that was judged (`tasks/evidence/gate.py`)."""
        folder = store.local_copy(judged["uri"])
        # Not all that is there: a local store is no copy, and has the operator's numbers.
        files = [folder / name for name in of_last_model(store.published(judged["uri"]))]
        (statement,) = (file.read_text() for file in files if file.name == WORDS)
        return Model(
            run=self._own,
            name=judged["model"],
            files=[self.events.keep(file) for file in files],
            folder=f"model/{judged['tags']['confide.spec_hash'][:16]}",
            description=f"{judged['sentence']}\n\n{statement}"[:4000],
            tags=judged["tags"],
            alias=ALIAS if judged["promoted"] else "",
        )

    def _add(self, *events: Event) -> None:
        self.events.append(*events)
        self.deliver()

    def deliver(self) -> None:
        """Deliver what can be, unless MLflow was asked or was down a moment ago."""
        if time.monotonic() < self._next:
            return
        try:
            self._delivery.deliver(self.events)
            self._next, self._down = time.monotonic() + EVERY, False
        except TrackingDown as error:
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
