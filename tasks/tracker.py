"""The steps' door to tracking: what a value may be shown to is decided by its type.

`publishable` takes `Dp` and `Public` values and nothing else; `operator` takes `Operator` values
and nothing else, and sends them to the restricted experiment. Only where all data is made up,
or public, does everything share one experiment.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dp_core.privacy.labels import Dp, Label, Labelled, Operator, Public, Publishable
from tasks.deployment import Deployment
from tasks.outbox import Identity, Outbox
from tasks.speech import say
from tasks.tracking import Delivery, TrackingDown, send_all
from tasks.tracking_lines import OPERATOR, PUBLIC, shown_key

PATIENCE = 30.0  # seconds between attempts to reach a tracker that is down
EVERY = 5.0  # seconds between deliveries of a step that is running
_UNFIT = re.compile(r"[^\w./ -]")


class Tracker:
    """One step's runs in MLflow; every call returns at once, whether MLflow is there or not."""

    def __init__(self, deployment: Deployment, identity: Identity) -> None:
        self._identity = identity
        self._outbox = Outbox.create(deployment.outbox, identity)
        self._deployment = deployment
        self._delivery = Delivery(deployment)
        self._next, self._down = 0.0, False
        self._used = {PUBLIC}

    def begin(self) -> None:
        """Mark the run and the step as running, also when an earlier attempt ended them."""
        for target in ("parent", "step"):
            self._add(PUBLIC, target, "begin")

    def publishable(
        self, values: Mapping[str, Publishable], step: int = 0, *, target: str = "step"
    ) -> None:
        """Record `dp` and `public` numbers.

        Raises:
            TypeError: a value of another type.
        """
        for name, value in values.items():
            if not isinstance(value, Dp | Public):
                raise TypeError(f"metric {name}: only Dp and Public values are publishable")
            self._metric(PUBLIC, target, name, value, step)

    def operator(
        self, values: Mapping[str, Operator], step: int = 0, *, target: str = "step"
    ) -> None:
        """Record numbers for the operator alone.

        Raises:
            TypeError: a value of another type.
        """
        for name, value in values.items():
            if not isinstance(value, Operator):
                raise TypeError(f"metric {name}: only Operator values belong here")
            self._metric(self._restricted, target, name, value, step)

    def labelled(self, name: str, value: Labelled, step: int = 0, *, target: str = "step") -> None:
        """Record a number where its own type sends it."""
        if isinstance(value, Operator):
            self.operator({name: value}, step, target=target)
        else:
            self.publishable({name: value}, step, target=target)

    def settings(
        self, values: Mapping[str, bool | int | float | str], *, target: str = "step"
    ) -> None:
        """Record settings, which are public, as parameters."""
        for name, value in values.items():
            text = f"{value:g}" if isinstance(value, float) else str(value)
            self._add(PUBLIC, target, "param", key=_fit(name), value=text[:500])

    def tag(self, name: str, value: str, *, target: str = "step") -> None:
        """Record a word or two about the run."""
        self._add(PUBLIC, target, "tag", key=_fit(name), value=value[:4000])

    def artifact(self, file: Path, label: Label, folder: str = "", *, target: str = "step") -> None:
        """Keep a file with the run, in the experiment of its label."""
        experiment = self._restricted if label is Label.OPERATOR else PUBLIC
        kept = self._outbox.keep(file)
        self._add(experiment, target, "artifact", file=kept, folder=folder or None)

    def dataset(self, name: str, ledger_id: str) -> None:
        """Name the data set that a release was charged to: no counts, no contents."""
        self._add(PUBLIC, "step", "dataset", name=name, digest=ledger_id[:36])

    def model(
        self, name: str, files: Sequence[Path], statement: str, tags: Mapping[str, str]
    ) -> None:
        """Register a model's files as a version of it, once, with its privacy statement.

        Args:
            name: of the model.
            files: each of them fit for publication.
            statement: what the model promises, in words.
            tags: of the version.
        """
        self._add(
            PUBLIC,
            "step",
            "model",
            name=name,
            files=[self._outbox.keep(file) for file in files],
            tags={**tags, "confide.spec_hash": self._identity.spec_hash},
            description=statement[:4000],
        )

    def flush(self) -> None:
        """Send now what can be sent, unless MLflow was down a moment ago."""
        self._deliver()

    def finish(self, status: str, *, also: tuple[str, ...] = ()) -> None:
        """End the step's runs (FINISHED, FAILED or KILLED) and send everything.

        Args:
            status: MLflow's word for how it ended.
            also: `point` or `parent`, when this step was its last.
        """
        self._next = 0.0
        if "parent" in also:  # of the whole job: what was left behind comes before
            self._deliver()
            self.send_left_behind()
        self._outbox.add(
            kind="end", status=status, targets=["step", *also], experiments=sorted(self._used)
        )
        if not self._down:
            self._next = 0.0
        self._deliver()

    def send_left_behind(self) -> None:
        """Send what earlier steps could not, if MLflow answers now."""
        if not self._down:
            send_all(self._deployment)

    def leave(self, status: str, *, also: tuple[str, ...] = ()) -> None:
        """End the runs, as `finish`, on disk only: the process has no time to reach anybody."""
        self._outbox.add(
            kind="end", status=status, targets=["step", *also], experiments=sorted(self._used)
        )

    def url(self, target: str = "step") -> str:
        """Return the run's page, or '' when there is none or MLflow was away a moment ago."""
        if self._down:
            return ""
        try:
            return self._delivery.url(self._identity, target)
        except TrackingDown:
            return ""

    @property
    def shown_run(self) -> str:
        """The run's key, as anyone may know it."""
        return shown_key(self._identity, PUBLIC)

    @property
    def _restricted(self) -> str:
        return PUBLIC if self._identity.made_up else OPERATOR

    def _metric(self, experiment: str, target: str, name: str, value: Labelled, step: int) -> None:
        number = float(value.value)
        if math.isfinite(number):
            self._add(experiment, target, "metric", key=_fit(name), value=number, step=step)
        else:  # MLflow would store infinity as the largest float
            self._add(experiment, target, "tag", key=_fit(name), value=str(number))

    def _add(self, experiment: str, target: str, kind: str, **line: object) -> None:
        self._used.add(experiment)
        self._outbox.add(kind=kind, experiment=experiment, target=target, **line)
        if time.monotonic() >= self._next:
            self._deliver()

    def _deliver(self) -> None:
        if time.monotonic() < self._next:
            return
        try:
            self._delivery.deliver(self._outbox)
            self._next, self._down = time.monotonic() + EVERY, False
        except TrackingDown as error:
            say(f"tracking is down ({error}): kept on disk, sent later", "warning")
            self._next, self._down = time.monotonic() + PATIENCE, True


def _fit(name: str) -> str:
    """Return the name in the characters that MLflow allows."""
    return _UNFIT.sub("_", name)
