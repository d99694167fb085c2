"""Calls that other processes compute: arguments, answers, and the check of the workers' code.

Arguments are pickled by Python's pickle module, which refuses privacy seeds. A worker unpickles
them only if it has the caller's code. Errors are returned as values. Confide's errors are returned
unchanged; of any other error only its kind and its place in our code, because its message may
quote text, which the cluster's logs would keep.
"""

from __future__ import annotations

import functools
import hashlib
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from dp_core.errors import BadInput, ConfideError, kind_and_place

# Results may depend on these packages, in addition to our own code and Python.
_SHAPING = ("numpy", "pyarrow", "tokenizers", "tensorflow-cpu", "tensorflow")


@dataclass(frozen=True)
class Outcome:
    """The end of a call: a value, or an error.

    Attributes:
        value: return value of the function.
        error: an error of Confide, or None.
        fault: kind and place of another error; empty if there was none.
    """

    value: Any = None
    error: ConfideError | None = None
    fault: str = ""

    def result(self) -> Any:
        """Return the value.

        Raises:
            ConfideError: the error of the function, or the kind and place of another error.
        """
        if self.error is not None:
            raise self.error
        if self.fault:
            raise ConfideError(f"a worker failed: {self.fault}", where="cluster")
        return self.value


@dataclass(frozen=True)
class Version:
    """The code that a call needs.

    Attributes:
        packages: packages whose sources count.
        digest: digest of their sources at the caller.
    """

    packages: tuple[str, ...]
    digest: str

    @classmethod
    def of(cls, packages: tuple[str, ...]) -> Version:
        """Return the version of this process."""
        return cls(packages, code_digest(packages))

    def check(self) -> None:
        """Raise `BadInput` if this process has other code."""
        if code_digest(self.packages) != self.digest:
            raise BadInput(
                "a worker has other code or libraries than this step",
                where=f"worker {socket.gethostname()}",
                fix="Start the cluster from the same image or checkout.",
            )


def outcome_of(call: Callable[[], Any]) -> Outcome:
    """Return the outcome of a call; it never raises."""
    try:
        return Outcome(call())
    except ConfideError as error:
        return Outcome(error=error)
    except BaseException as error:  # noqa: BLE001 - a library's panic may quote text, too
        return Outcome(fault=kind_and_place(error))


def packed(value: Any) -> bytes:
    """Return a value as bytes for another process of this deployment."""
    return bytes(ForkingPickler.dumps(value))


def unpacked(content: bytes) -> Any:
    """Return the value of `packed` bytes. Members of a cluster trust each other with this."""
    return ForkingPickler.loads(content)


def map_shard(version: Version, function: bytes, shard: bytes) -> bytes:
    """Return the packed outcome of a packed function at a packed shard."""

    def call() -> Any:
        version.check()
        return unpacked(function)(unpacked(shard))

    outcome = outcome_of(call)
    try:
        return packed(outcome)
    except Exception as error:  # noqa: BLE001 - its message may quote the value
        return packed(Outcome(fault=kind_and_place(error)))


class HostProcess:
    """One host of a training, in a process that may be started again at any time.

    Args:
        version: version of the caller's code.
        made: packed function without arguments, which returns the host's function of two arguments.
    """

    def __init__(self, version: Version, made: bytes) -> None:
        self._version, self._made = version, made
        self._function: Callable[[Any, Any], Any] | None = None

    def call(self, shared: Any, argument: Any) -> Outcome:
        """Return the outcome of the host's function; the first call makes the function."""

        def call() -> Any:
            if self._function is None:
                self._version.check()
                self._function = unpacked(self._made)()
            return self._function(shared, argument)

        return outcome_of(call)


@functools.cache
def code_digest(packages: tuple[str, ...]) -> str:
    """Return a digest of the packages' sources and of the libraries that shape results.

    A missing package has no sources, so its absence changes the digest.
    """
    digest = hashlib.sha256(repr(sys.version_info[:2]).encode())
    for name in _SHAPING:
        with suppress(metadata.PackageNotFoundError):
            digest.update(f"{name}=={metadata.version(name)}\n".encode())
    for package in packages:
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for file in sorted(Path(folder).rglob("*.py")):
                content = hashlib.sha256(file.read_bytes()).hexdigest()
                digest.update(f"{package}/{file.relative_to(folder)} {content}\n".encode())
    return digest.hexdigest()
