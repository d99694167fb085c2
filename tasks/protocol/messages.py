"""The answers of a step: messages to its launcher while it runs, and its result.

Messages are typed, versioned JSON objects, one per line. They are separate from the log, which is
for people and is never parsed. `CONFIDE_MESSAGES` names the channel: a file (for processes, and on
Kubernetes the container's termination message) or `stdout` (for containers of an engine). A message
never contains private data.

The result is `result.json`, the last file of a step. A step without it has failed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from dp_core.config.fields import Config
from dp_core.config.release import ReleaseRecord

CHANNEL = "CONFIDE_MESSAGES"
STDOUT = "stdout"


class _Message(Config):
    """The base class of all messages. Another version is not read."""

    version: Literal[1] = 1


class StepProgress(_Message):
    """The step has done `done` of `total` pieces of work; `total` is 0 if it is unknown."""

    kind: Literal["progress"] = "progress"
    done: int
    total: int
    note: str = ""


class TrackedAt(_Message):
    """The address of the step's run in MLflow."""

    kind: Literal["tracked_at"] = "tracked_at"
    url: str = Field(pattern=r"^https?://\S+$")


class Failed(_Message):
    """The step ends without a result. `reason` is one line."""

    kind: Literal["failed"] = "failed"
    exit_code: int
    reason: str


class Judged(_Message):
    """The verdict on one of the job's models, in words that may all be published."""

    kind: Literal["judged"] = "judged"
    model: str
    verdict: str
    sentence: str


Message = StepProgress | TrackedAt | Failed | Judged
_ADAPTER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def parse(line: str) -> Message | None:
    """Return the message in a line, or None if it is no message or has another version."""
    try:
        return _ADAPTER.validate_json(line)
    except ValidationError:
        return None


class Lines:
    """Joins the pieces of a stream, which may be cut anywhere, to lines that are not empty."""

    def __init__(self) -> None:
        self._begun = b""

    def add(self, piece: bytes) -> list[str]:
        """Return the lines that end in the next piece; an empty piece ends the last line."""
        *lines, self._begun = (self._begun + piece).split(b"\n")
        if not piece:
            lines, self._begun = [self._begun], b""
        texts = (line.decode(errors="replace").rstrip() for line in lines)
        return [text for text in texts if text]


def channel_file(home: Path, run_key: str, task: str, map_index: int = -1) -> Path:
    """Return the channel file of an Airflow task's step, which followers of the run read too."""
    name = task if map_index < 0 else f"{task}.{map_index}"
    return home / "messages" / re.sub(r"[^\w.+-]", "_", run_key) / f"{name}.jsonl"


class Follower:
    """Reads a step's messages and keeps the last one of each kind.

    Args:
        file: the step's channel if it is a file, which need not exist yet.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file, self._offset, self._lines = file, 0, Lines()
        self.progress = StepProgress(done=0, total=0)
        self.tracked_at = ""
        self.failed: Failed | None = None
        self.judged: dict[str, Judged] = {}  # by model, because a log may be read twice

    def hear(self, line: str) -> bool:
        """Read a line and return whether it was a message."""
        match parse(line):
            case StepProgress() as message:
                self.progress = message
            case TrackedAt(url=url):
                self.tracked_at = url
            case Failed() as message:
                self.failed = message
            case Judged() as message:
                self.judged[message.model] = message
            case None:
                return False
        return True

    def look(self) -> Follower:
        """Read the lines added to the file since the last call and return the follower."""
        if self._file is not None and self._file.exists():
            with self._file.open("rb") as stream:
                stream.seek(self._offset)
                content = stream.read()
            self._offset += len(content)
            for line in self._lines.add(content) if content else ():
                self.hear(line)
        return self

    def reason(self, default: str = "it ended without a word: see its log") -> str:
        """Return the step's reason for its failure, or the default if it sent none."""
        return self.failed.reason if self.failed else default


# --- the result


class MetricRecord(Config):
    """One number with its label. `step` is its update or epoch."""

    name: str
    value: float
    label: Literal["dp", "public", "operator"]
    step: int = 0


class StepResult(Config):
    """The results of a finished step, for later steps and for people."""

    version: Literal[3] = 3
    step: str
    spec_hash: str
    outputs: dict[str, str]  # name -> URI
    metrics: list[MetricRecord]
    releases: list[ReleaseRecord] = Field(default_factory=list)  # also of the steps it depends on
    facts: dict[str, Any] = Field(default_factory=dict)  # fit for publication: no private text
    seconds: float = 0.0
    versions: dict[str, str] = Field(default_factory=dict)

    @property
    def operator_files(self) -> frozenset[str]:
        """Files of the output that are for the operator alone and are never passed on."""
        artifacts = self.facts.get("artifacts", {})
        return frozenset(file for file, label in artifacts.items() if label == "operator")
