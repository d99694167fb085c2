"""What the tracker has to be told, kept on disk until it has been told: nothing lost or doubled.

An outbox belongs to one step of one run: `identity.json`, a file of JSON lines that only grows,
copies of artifacts, and `sent`, the number of lines that the tracker has confirmed. Each line
carries the time at which it arose, so that a line that is sent twice is stored once.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.runtime.messages import alone, append, read, still_there

Line = dict[str, Any]
FORGOTTEN = 30 * 86_400.0  # seconds of silence after which a step that did not end will not


@dataclass(frozen=True)
class Identity:
    """Which run of the tracker a step's lines belong to.

    Attributes:
        run_key: one parent run per key.
        run_name: the parent's name.
        task: the step's name within its run.
        point: the sweep point's name, or empty.
        step: the kind of step.
        spec_hash: one child run per hash and run key.
        made_up: everything may be shown.
        salt: a secret, in hex; empty where everything may be shown. Without it, who guesses when
            a run began could confirm it by the tags of its runs.
    """

    run_key: str
    run_name: str
    task: str
    point: str
    step: str
    spec_hash: str
    made_up: bool
    salt: str = ""

    def key(self, target: str) -> str:
        """Return the unique tag of the run that `target` (parent, point or step) names."""
        parts = {
            "parent": [self.run_key],
            "point": [self.run_key, self.point],
            "step": [self.run_key, self.spec_hash, "step"],
        }[target]
        return self.hidden(json.dumps(parts))

    def hidden(self, text: str) -> str:
        """Return what stands for a text where it may not be shown, in hex."""
        if not self.salt:
            return hashlib.sha256(text.encode()).hexdigest()
        return hmac.new(bytes.fromhex(self.salt), text.encode(), hashlib.sha256).hexdigest()


class Outbox:
    """The lines of one step; several processes may hold it, one at a time sends."""

    def __init__(self, folder: Path, whose: Identity | None = None) -> None:
        self.folder, self._whose = folder, whose
        self._lines = folder / "lines.jsonl"
        self._sent = folder / "sent"

    @classmethod
    def create(cls, parent: Path, identity: Identity) -> Outbox:
        """Open the outbox of a step, making it if need be."""
        outbox = cls(parent / identity.key("step")[:32], identity)
        outbox._make(identity)
        return outbox

    @classmethod
    def all(cls, parent: Path) -> list[Outbox]:
        """Return the outboxes that still hold something."""
        found = sorted(f.parent for f in parent.glob("*/identity.json"))
        # The name under which `remove` deletes one: it has said all, also if that was interrupted.
        return [cls(folder) for folder in found if folder.suffix != ".sent"]

    @property
    def identity(self) -> Identity:
        """Return whose lines these are."""
        return Identity(**json.loads((self.folder / "identity.json").read_text()))

    def add(self, **line: Any) -> None:
        """Append one line, with the time."""
        line.setdefault("time", int(time.time() * 1000))
        text = json.dumps(line)
        try:
            append(self._lines, text)
        except FileNotFoundError:
            if self._whose is None:
                raise
            self._make(self._whose)  # an earlier try's lines had all arrived: it was removed
            append(self._lines, text)

    def keep(self, file: Path) -> str:
        """Keep a file until it is sent; return its name here."""
        if self._whose is not None and not (self.folder / "identity.json").exists():
            self._make(self._whose)  # removed meanwhile, as in `add`
        name = hashlib.sha256(str(file).encode()).hexdigest()[:12]
        kept = self.folder / "files" / name / file.name
        kept.parent.mkdir(parents=True, exist_ok=True)
        temporary = kept.with_name(f"{kept.name}.partial")
        temporary.unlink(missing_ok=True)
        try:
            os.link(file, temporary)
        except OSError:  # another disk
            shutil.copyfile(file, temporary)
        temporary.replace(kept)
        return f"{name}/{file.name}"

    def file(self, name: str) -> Path:
        """Return where a kept file lies."""
        return self.folder / "files" / name

    def unsent(self) -> tuple[int, list[Line]]:
        """Return how many lines were sent, and the whole lines that were not."""
        sent = 0
        with suppress(FileNotFoundError):  # nothing yet, or all of it a moment ago
            sent = int(self._sent.read_text())
        return sent, [json.loads(line) for line in read(self._lines)[sent:]]

    @property
    def complete(self) -> bool:
        """Whether every line has arrived, and the step has ended or was killed long ago."""
        if self.unsent()[1]:
            return False
        told = read(self._lines)
        ended = bool(told) and json.loads(told[-1])["kind"] == "end"
        return ended or time.time() - self._last_use() > FORGOTTEN

    def confirm(self, sent: int) -> None:
        """Record that the first `sent` lines have arrived."""
        _replace(self._sent, str(sent))

    def remove(self) -> None:
        """Forget an outbox whose lines have all arrived, unless a line comes at this moment."""
        gone = self.folder.with_name(f"{self.folder.name}.sent")
        shutil.rmtree(gone, ignore_errors=True)
        with alone(self._lines):
            if not self.complete:
                return
            self.folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _last_use(self) -> float:
        files = [self.folder / "identity.json", self._lines]
        return max((f.stat().st_mtime for f in files if f.exists()), default=time.time())

    def _make(self, identity: Identity) -> None:
        while True:  # whoever sends an earlier try's last lines may take the folder away here
            with suppress(FileNotFoundError):
                (self.folder / "files").mkdir(parents=True, exist_ok=True)
                _replace(self.folder / "identity.json", json.dumps(asdict(identity)))
                return

    @contextmanager
    def sending(self) -> Iterator[bool]:
        """Hold the right to send; yields False when another process holds it, or has sent all."""
        file = self.folder / "lock"
        try:
            lock = file.open("w")
        except FileNotFoundError:  # made here, the folder would stay, and nobody's
            yield False
            return
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield still_there(file, lock.fileno())


def _replace(file: Path, content: str) -> None:
    temporary = file.with_name(f"{file.name}.{os.getpid()}.partial")
    temporary.write_text(content)
    temporary.replace(file)
