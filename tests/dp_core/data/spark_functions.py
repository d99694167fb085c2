"""Functions of a shard for the tests of engines: a worker must be able to import them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from dp_core.errors import BadInput


def squared(shard: int) -> int:
    return shard * shard


def refused(shard: int) -> int:
    if shard % 2:
        raise BadInput("an odd shard", where=f"shard {shard}", fix="Use even ones.")
    return shard


def broken(shard: str) -> str:
    """A bug of ours, whose message quotes what it read."""
    raise ValueError(f"cannot read {shard}")


def environment(shard: str) -> dict[str, str]:
    return dict(os.environ)


def processes(shard: Path) -> tuple[int, int]:
    """The worker's own process, and the executor's, of which it is the grandchild."""
    fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    return os.getpid(), int(fields[1])


@dataclass(frozen=True)
class Gate:
    """Doubles a number, once a file is there: until then everyone waits, and says that it does.

    Attributes:
        folder: where `open` will be, and where each call leaves `SHARD.PROCESS.EXECUTOR`.
    """

    folder: Path
    patience: float = 120.0

    def __call__(self, shard: int) -> int:
        process, executor = processes(self.folder)
        (self.folder / f"{shard}.{process}.{executor}").touch()
        until = time.monotonic() + self.patience
        while not (self.folder / "open").exists():
            if time.monotonic() > until:
                raise TimeoutError
            time.sleep(0.05)
        return 2 * shard


@dataclass(frozen=True)
class Echo:
    """Says what it was told before what it reads."""

    before: str

    def __call__(self, shard: str) -> str:
        return self.before + shard
