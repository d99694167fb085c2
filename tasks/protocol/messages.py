"""Typed, versioned messages of a running step to its launcher, one JSON object per line.

They are separate from the log, which is for people and is never parsed. `CONFIDE_MESSAGES` names
the channel: a file (for processes, and on Kubernetes the container's termination message) or
`stdout` (for containers of an engine). A message never contains private data.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from dp_core.config.fields import Config

CHANNEL = "CONFIDE_MESSAGES"
STDOUT = "stdout"


class StepProgress(Config):
    """The step has done `done` of `total` pieces of work; `total` is 0 if it is unknown."""

    version: Literal[1] = 1
    kind: Literal["progress"] = "progress"
    done: int
    total: int
    note: str = ""


class TrackedAt(Config):
    """The address of the step's run in MLflow."""

    version: Literal[1] = 1
    kind: Literal["tracked_at"] = "tracked_at"
    url: str = Field(pattern=r"^https?://\S+$")


class Finished(Config):
    """The step has written its result."""

    version: Literal[1] = 1
    kind: Literal["finished"] = "finished"
    result: str


class Failed(Config):
    """The step ends without a result. `reason` is one line."""

    version: Literal[1] = 1
    kind: Literal["failed"] = "failed"
    exit_code: int
    reason: str


class Judged(Config):
    """The verdict on one of the job's models, in words that may all be published."""

    version: Literal[1] = 1
    kind: Literal["judged"] = "judged"
    model: str
    verdict: str
    sentence: str


Message = StepProgress | TrackedAt | Finished | Failed | Judged
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
        self._file, self._offset = file, 0
        self.progress = StepProgress(done=0, total=0)
        self.tracked_at = ""
        self.failed: Failed | None = None
        self.finished: Finished | None = None
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
            case Finished() as message:
                self.finished = message
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
            whole = content[: content.rfind(b"\n") + 1]
            self._offset += len(whole)
            for line in whole.decode(errors="replace").split("\n"):
                self.hear(line)
        return self

    def reason(self, default: str = "it ended without a word: see its log") -> str:
        """Return the step's reason for its failure, or the default if it sent none."""
        return self.failed.reason if self.failed else default
