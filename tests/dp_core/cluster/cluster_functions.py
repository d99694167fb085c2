"""Functions of a shard or a host for tests of clusters, which workers can import."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dp_core.errors import BadInput


def nothing(shard: int) -> None:
    return None


def refused(shard: int) -> int:
    if shard % 2:
        raise BadInput("an odd shard", where=f"shard {shard}", fix="Use even ones.")
    return shard


def broken(shard: str) -> str:
    raise ValueError(f"cannot read {shard}")


class PanicException(BaseException):
    """A panic in Rust, which is not an `Exception`."""


def panic(shard: str) -> str:
    raise PanicException(f"inside of {shard}")


def unpicklable(shard: str) -> Callable[[], str]:
    """A value that cannot be pickled, with an error that would quote it."""
    return lambda: shard


def environment(shard: str) -> dict[str, str]:
    return dict(os.environ)


def process(shard: int) -> int:
    time.sleep(0.2)
    return os.getpid()


@dataclass(frozen=True)
class Gate:
    """Doubles a number after the file `open` exists; each call leaves a file `SHARD.PROCESS`."""

    folder: Path
    patience: float = 120.0

    def __call__(self, shard: int) -> int:
        (self.folder / f"{shard}.{os.getpid()}").touch()
        until = time.monotonic() + self.patience
        while not (self.folder / "open").exists():
            if time.monotonic() > until:
                raise TimeoutError
            time.sleep(0.05)
        return 2 * shard


@dataclass(frozen=True)
class Echo:
    before: str

    def __call__(self, shard: str) -> str:
        return self.before + shard


@dataclass(frozen=True)
class HostGate:
    """Makes a host's function, which waits like `Gate` and returns its arguments and process."""

    folder: Path

    def __call__(self) -> Callable[[Any, Any], tuple[Any, Any, int]]:
        gate = Gate(self.folder)

        def call(shared: Any, argument: Any) -> tuple[Any, Any, int]:
            gate(argument)
            return shared, argument, os.getpid()

        return call


@dataclass(frozen=True)
class HostRefusal:
    """Raises an error instead of making a function: the host's rows are wrong."""

    def __call__(self) -> Callable[[Any, Any], Any]:
        raise BadInput("a host reads other rows than the step")
