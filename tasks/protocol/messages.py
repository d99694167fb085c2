"""What a running step tells whoever started it: typed, versioned messages, one JSON object a line.

They travel apart from the log, which is for people, and nobody parses it. `CONFIDE_MESSAGES` names
the channel: a file (processes; on Kubernetes the container's termination message) or `stdout`
(containers of an engine). Nothing private is ever in a message.
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
    """`done` of `total` pieces of work are behind us; `total` is 0 where it is not known."""

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
    """The result is written."""

    version: Literal[1] = 1
    kind: Literal["finished"] = "finished"
    result: str


class Failed(Config):
    """The step ends without a result, and why, in one line."""

    version: Literal[1] = 1
    kind: Literal["failed"] = "failed"
    exit_code: int
    reason: str


class Judged(Config):
    """The verdict on a model that the job made; every word of it is fit for publication."""

    version: Literal[1] = 1
    kind: Literal["judged"] = "judged"
    model: str
    verdict: str
    sentence: str


Message = StepProgress | TrackedAt | Finished | Failed | Judged
_ADAPTER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def parse(line: str) -> Message | None:
    """Return the message of a line; None where it is none, or one of another version."""
    try:
        return _ADAPTER.validate_json(line)
    except ValidationError:
        return None


def channel_file(home: Path, run_key: str, task: str, map_index: int = -1) -> Path:
    """Return the channel of an Airflow task's step, which whoever follows the run reads too."""
    name = task if map_index < 0 else f"{task}.{map_index}"
    return home / "messages" / re.sub(r"[^\w.+-]", "_", run_key) / f"{name}.jsonl"


class Follower:
    """What a step has said so far: the last message of each kind.

    Args:
        file: the step's channel, where that is a file; it need not be there yet.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file, self._offset = file, 0
        self.progress = StepProgress(done=0, total=0)
        self.tracked_at = ""
        self.failed: Failed | None = None
        self.finished: Finished | None = None
        self.judged: dict[str, Judged] = {}  # by model: a log may be heard twice

    def hear(self, line: str) -> bool:
        """Take a line in; return whether it was a message."""
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
        """Take in what the file has more than at the last look; return itself."""
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
        """Return why the step failed, in its own words where it had time for them."""
        return self.failed.reason if self.failed else default
