"""The event log of a step: all its numbers, settings, files and models, written once, in order.

`result.json` and MLflow are both made from it. A log belongs to a step of a run and outlives
attempts: a retry continues in the same file, and a retry in another run takes over its numbers. The
delivery to MLflow remembers the last delivered offset. The log is removed after the work is done
and all events have been delivered.
"""

import hashlib
import hmac
import json
import math
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Context
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, TypeAdapter, model_validator

from dp_core.config.fields import Config
from dp_core.labels import Dp, Label, Labelled, Operator, Public
from tasks.protocol.messages import MetricRecord
from tasks.storage import journal
from tasks.storage.backends import LocalBackend

Target = Literal["step", "model", "parent"]
Status = Literal["FINISHED", "FAILED", "KILLED"]
VERDICT = "confide.verdict"  # the tag of a model's version with the verdict of its audits
_PROMOTED = ("consistent", "inconclusive", "not audited")  # no alias with any other verdict

INFINITE = sys.float_info.max  # by which MLflow stores infinity
ABANDONED = 30 * 24 * 3600 * 1000  # milliseconds: older unfinished work is not waited for


def now() -> int:
    """Return the time in milliseconds."""
    return int(time.time() * 1000)


class _Event(Config):
    version: Literal[1] = 1
    time: int = Field(default_factory=now)  # milliseconds
    target: Target = "step"  # the MLflow run that receives it
    model: str = ""  # the model of a target `model`, if it is not the model of the step


class Begun(_Event):
    """A run and its step are running, possibly again after an earlier attempt ended them."""

    kind: Literal["begun"] = "begun"


class Metric(_Event):
    """One finite number; its label decides which experiment shows it."""

    kind: Literal["metric"] = "metric"
    name: str
    value: float
    label: Label
    step: int = 0


class Param(_Event):
    """A setting; settings are public."""

    kind: Literal["param"] = "param"
    name: str
    value: str


class Tag(_Event):
    """A short text about the run."""

    kind: Literal["tag"] = "tag"
    name: str
    value: str
    label: Label = Label.PUBLIC


class LoggedArtifact(_Event):
    """A file kept with the log (`EventLog.keep`), which MLflow shows in a folder of the run."""

    kind: Literal["artifact"] = "artifact"
    file: str
    label: Label
    folder: str = ""


class ChargedDataset(_Event):
    """The data set that a release was charged to: no counts, no contents."""

    kind: Literal["dataset"] = "dataset"
    name: str
    ledger_id: str


class LoggedModel(_Event):
    """A model's publishable files, with its privacy statement and its verdict."""

    kind: Literal["model"] = "model"
    name: str
    files: list[str]
    folder: str = "model"  # of the run's artifacts
    description: str
    tags: dict[str, str]
    alias: str = ""  # alias of its version; empty if audits contradict its claim

    @model_validator(mode="after")
    def _no_alias_against_the_verdict(self) -> Self:
        if self.alias and self.tags.get(VERDICT) not in _PROMOTED:
            raise ValueError(f"alias: the verdict is {self.tags.get(VERDICT)}")
        return self


class ModelShown(_Event):
    """A model's run becomes a row of MLflow's list, with its replicates below it."""

    kind: Literal["shown"] = "shown"
    target: Target = "model"
    name: str
    description: str
    replicates: tuple[str, ...] = ()  # models whose runs are nested below it
    holds_job: bool = False  # the job's run, with the shared steps, is nested below it, too
    status: Status = "FINISHED"


class AttemptEnded(_Event):
    """An attempt has ended; the last step also ends its model's run or the whole run."""

    kind: Literal["ended"] = "ended"
    status: Status
    refused: bool = False  # the step did nothing, because of its settings, data or budget
    contradicted: bool = False  # the step failed because of a verdict, which is public
    also: tuple[Target, ...] = ()
    closed: bool = True  # no state is left for a further attempt to continue from


Event = (
    Begun
    | Metric
    | Param
    | Tag
    | LoggedArtifact
    | ChargedDataset
    | LoggedModel
    | ModelShown
    | AttemptEnded
)
_ADAPTER: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])
KINDS: tuple[type[Event], ...] = get_args(Event)  # in the order of delivery to MLflow
_UNFIT = re.compile(r"[^\w./ -]")  # characters that MLflow forbids in names


def metric(name: str, value: Labelled, step: int = 0, *, target: Target = "step") -> Metric | Tag:
    """Return the event of a number; a number that is not finite becomes a tag.

    MLflow would store infinity as the largest float.

    Raises:
        TypeError: the number has no label.
    """
    if not isinstance(value, Dp | Public | Operator):
        raise TypeError(f"metric {name}: a number needs a label: Dp, Public or Operator")
    number, label = float(value.value), Label(value.label)
    if math.isfinite(number):
        return Metric(name=name, value=number, label=label, step=step, target=target)
    return Tag(name=name, value=str(number), label=label, target=target)


def rounded(number: MetricRecord) -> MetricRecord:
    """Return the number with four digits for a list of models; ε and δ are rounded up."""
    if not math.isfinite(number.value) or number.value == INFINITE:
        return number
    up = number.name.startswith(("epsilon", "delta"))
    digits = Context(prec=4, rounding=ROUND_CEILING if up else ROUND_HALF_EVEN)
    value = float(digits.create_decimal(repr(float(number.value))))
    return number.model_copy(update={"value": value})


def fit(name: str) -> str:
    """Return the name with every character that MLflow forbids replaced."""
    return _UNFIT.sub("_", name)


@dataclass(frozen=True)
class Identity:
    """The MLflow run that a step's events belong to.

    Attributes:
        run_key: key of the parent run.
        run_name: the parent's name.
        task: the step's name within its run.
        model: name of the step's model in the job (in a sweep, of the point), or empty.
        step: the kind of step.
        spec_hash: there is one child run per hash and run key.
        made_up: the data are made up, so every number may be public.
        salt: a secret, in hex; empty for made-up data. Without it, a guess of the run's start
            time could be confirmed by the tags of its runs.
        hides_count: all events are for the operator, because any time in the run could reveal the
            secret number of its trainings.
    """

    run_key: str
    run_name: str
    task: str
    model: str
    step: str
    spec_hash: str
    made_up: bool
    salt: str = ""
    hides_count: bool = False

    def key(self, target: Target) -> str:
        """Return the unique tag of the MLflow run of `target`."""
        parts = {
            "parent": [self.run_key],
            "model": [self.run_key, self.model],
            "step": [self.run_key, self.spec_hash, "step"],
        }[target]
        return self.hidden(json.dumps(parts))

    def hidden(self, text: str) -> str:
        """Return a salted digest, in hex, that replaces a text in public places."""
        if not self.salt:
            return hashlib.sha256(text.encode()).hexdigest()
        return hmac.new(bytes.fromhex(self.salt), text.encode(), hashlib.sha256).hexdigest()


class EventLog:
    """The log of one step of one run, in a folder that processes of this machine may share.

    The first line of the file is the identity of the run, and the others are its events.
    """

    def __init__(self, folder: Path, identity: Identity) -> None:
        self.folder, self.identity = folder, identity
        self._events, self._head = folder / "events.jsonl", json.dumps(asdict(identity))

    @classmethod
    def of(cls, parent: Path, identity: Identity) -> Self:
        """Return the log of a run's step, which exists after its first event."""
        return cls(parent / f"{_work(identity)}-{identity.key('step')[:32]}", identity)

    @classmethod
    def all(cls, parent: Path) -> list[Self]:
        """Return all logs in a folder."""
        logs = []
        for file in sorted(parent.glob("*/events.jsonl")):
            lines = journal.read(file)[0]
            # The suffix marks a log whose removal has begun and may have been interrupted.
            if lines and file.parent.suffix != ".removed":
                logs.append(cls(file.parent, Identity(**json.loads(lines[0]))))
        return logs

    def append(self, *events: Event) -> None:
        """Append events, in this order."""
        lines = [event.model_dump_json() for event in events]
        while True:  # another process may remove the folder after a complete delivery
            with suppress(FileNotFoundError):
                self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                journal.append(self._events, *lines, head=self._head)
                return

    def read(self, start: int = 0) -> tuple[list[Event], int]:
        """Return the events from an offset on, and the offset after them."""
        lines, end = journal.read(self._events, start)
        return [_ADAPTER.validate_json(line) for line in lines[0 if start else 1 :]], end

    def take_over(self, parent: Path) -> None:
        """Copy the numbers of the unfinished work that this new log continues from other runs."""
        if self.read()[0]:
            return
        for log in EventLog.all(parent):
            if _work(log.identity) == _work(self.identity) and not log.is_over():
                events = log.read()[0]
                numbers = [e for e in events if isinstance(e, Metric | Tag) and e.target == "step"]
                ends = [e.status for e in events if isinstance(e, AttemptEnded)]
                self.append(*numbers)
                log.append(AttemptEnded(status=ends[-1] if ends else "KILLED"))

    def metrics(self) -> list[MetricRecord]:
        """Return the last value of every metric at each step, also from earlier attempts."""
        last: dict[tuple[str, int], MetricRecord] = {}
        for event in self.read()[0]:
            if isinstance(event, Metric) and event.target == "step":
                record = MetricRecord(
                    name=event.name, value=event.value, label=event.label.value, step=event.step
                )
                last[event.name, event.step] = record
        return [last[key] for key in sorted(last)]

    def keep(self, file: Path) -> str:
        """Keep a file with the log; return its name in the log."""
        name = f"{hashlib.sha256(str(file).encode()).hexdigest()[:12]}/{file.name}"
        LocalBackend(self.folder / "files").put(file, name)
        return name

    def kept(self, name: str) -> Path:
        """Return the path of a kept file."""
        return self.folder / "files" / name

    # --- deliveries

    def undelivered(self) -> tuple[list[Event], int]:
        """Return the events not yet delivered, and the offset after them."""
        start = 0
        with suppress(FileNotFoundError):  # no delivery yet, or the log was just removed
            start = int((self.folder / "delivered").read_text())
        return self.read(start)

    def confirm(self, offset: int) -> None:
        """Record that all events before an offset were delivered."""
        LocalBackend(self.folder).write("delivered", str(offset).encode())

    @contextmanager
    def delivering(self) -> Iterator[bool]:
        """Hold the right to deliver; yield False if another process holds it or has delivered."""
        with ExitStack() as stack:
            try:
                stack.enter_context(journal.exclusive(self.folder / "lock", wait=False))
            except (BlockingIOError, FileNotFoundError):  # a removed folder is not made again
                yield False
            else:
                yield True

    def remove_if_delivered(self) -> None:
        """Remove a log of finished or abandoned work after the delivery of all events."""
        gone = self.folder.with_name(f"{self.folder.name}.removed")
        shutil.rmtree(gone, ignore_errors=True)
        with suppress(FileNotFoundError), journal.exclusive(self._events):
            if self.undelivered()[0] or not self.is_over():
                return
            self.folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def is_over(self) -> bool:
        """Return whether no retry will continue the work: it is finished or abandoned."""
        events = self.read()[0]
        turns = [event for event in events if isinstance(event, Begun | AttemptEnded)]
        over = bool(turns) and isinstance(turns[-1], AttemptEnded) and turns[-1].closed
        return over or (bool(events) and events[-1].time < now() - ABANDONED)


def _work(identity: Identity) -> str:
    return f"{identity.step}-{identity.spec_hash[:16]}"
