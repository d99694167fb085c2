"""Shards on Apache Spark: each in a task of its own, and the same bytes as in process.

The process that calls `Spark.map` is Spark's driver. For every shard it starts a job of one task,
as many at a time as the cluster has cores, and takes the results in the shards' order. A shard
whose worker is lost is done again by another one: since a function of a shard depends on the shard
alone, the result does not show it.

A worker knows of the text what its function opens. Spark and its logs learn nothing of it:

- functions, shards and results travel as bytes in a task and its answer, and these, like all that
  Spark keeps on a disk meanwhile, are encrypted under the cluster's secret;
- what a function raises never reaches Spark: errors of ours travel as values, and of any other
  error Spark is told the kind and the place in our code;
- jobs, stages and data sets have no names of ours: the event log holds times, sizes and machines.

A privacy seed refuses to be pickled, so none can travel. A worker with other code refuses.

Source: Zaharia et al., "Resilient Distributed Datasets", NSDI 2012; Spark's own page "Security".
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import itertools
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from subprocess import DEVNULL
from typing import Any, TypeVar

from dp_core.errors import BadInput, ConfideError, kind_and_place

T = TypeVar("T")
R = TypeVar("R")

WHERE = "data engine"
MASTER = re.compile(
    r"local\[[\w*,]+\]|local-cluster\[\d+,\d+,\d+\]|spark://\S+:\d+(,\S+:\d+)*|yarn|k8s://\S+"
)
PATIENCE = 120.0  # seconds without any worker, after which a map gives up
_MOST_AT_ONCE = 256  # shards in flight, whatever the cluster's size
_LOOK = 2.0  # seconds between two looks at whether there are workers at all
_NO_CODE = "ModuleNotFoundError: No module named 'dp_core"
_FAULT = re.compile(r"WorkerFault: (\w+(?: \([^)\n]*\))?(?: at [\w./-]+:\d+)?)")
# What a function returns may depend on these, besides our own code and Python.
_SHAPING = ("numpy", "pyarrow", "tokenizers")


class WorkerFault(Exception):
    """What a worker tells Spark of an error that is not ours: its kind and place, no message."""


class Spark:
    """An Apache Spark cluster as a data engine; the session starts with the first `map`.

    Args:
        master: `spark://HOST:PORT`, `yarn`, `k8s://…`; or on this machine
            `local-cluster[N,CORES,MB]` (N executors, each a process of its own) and `local[N]`.
        secret: by which everybody in a standalone cluster knows each other (`spark.authenticate`);
            for the other kinds one is drawn.
        environment: variables that executors on this machine are given in place of its own.
        events: folder for Spark's event logs; None for none.
        home: Spark's own folder, where `pyspark` cannot be imported as it is.
        packages: whose code must be the driver's on every worker.
        settings: more of Spark's own settings, above those of its `spark-defaults.conf`.
        patience: seconds without any worker, after which a map gives up.
        debug: let Spark's own log through to this process's output.

    Raises:
        BadInput: no master of these kinds, or a cluster that would run anybody's code.
    """

    def __init__(
        self,
        master: str,
        *,
        secret: str = "",
        environment: Mapping[str, str] | None = None,
        events: Path | None = None,
        home: Path | None = None,
        packages: Sequence[str] = ("dp_core",),
        settings: Mapping[str, str] | None = None,
        patience: float = PATIENCE,
        debug: bool = False,
    ) -> None:
        if not MASTER.fullmatch(master):
            raise BadInput(
                f"{master!r} is no Spark cluster",
                where=WHERE,
                fix="Use spark://HOST:PORT, yarn, k8s://ADDRESS or local-cluster[2,1,1024].",
            )
        if master.startswith("spark://") and not secret:
            raise BadInput(
                "a Spark cluster without a secret would run anybody's code beside private text",
                where=WHERE,
                fix="Set CONFIDE_SPARK_SECRET to the cluster's spark.authenticate.secret.",
            )
        self._master, self._secret = master, secret or secrets.token_hex(32)
        self._environment, self._events, self._home = dict(environment or {}), events, home
        self._packages, self._settings = tuple(packages), dict(settings or {})
        self._patience, self._debug = patience, debug
        self._context: Any = None
        self._gateway: Any = None
        self._scratch: Path | None = None

    def map(self, function: Callable[[T], R], shards: Sequence[T]) -> Iterator[R]:
        """Yield the function's value of every shard, in their order; see `DataEngine`.

        Raises:
            BadInput: as the function raised it; a worker has other code; there is no Spark here.
            ConfideError: Spark lost a shard's worker more often than it retries, has no workers, or
                a function failed on each retry: where, and the kind of error.
        """
        if not shards:
            return
        context = self._started()
        version = code_version(self._packages)
        code = context.broadcast(_packed(function))
        one = context.parallelize([0], 1)  # a partition; each shard's task is all that it is for
        waiting = iter(shards)
        ahead: deque[Future[bytes]] = deque()
        with ThreadPoolExecutor(_MOST_AT_ONCE, "spark-job") as threads:
            try:
                while True:
                    room = min(context.defaultParallelism + 1, _MOST_AT_ONCE) - len(ahead)
                    for shard in itertools.islice(waiting, max(room, 0)):
                        task = _Task(version, self._packages, code, _packed(shard))
                        ahead.append(threads.submit(_run, one, task))
                    if not ahead:
                        break
                    outcome: _Outcome = _unpacked(self._answer(ahead.popleft()))
                    if outcome.error is not None:
                        raise outcome.error
                    yield outcome.value
            finally:
                for future in ahead:
                    future.cancel()
                if ahead:
                    with suppress(Exception):  # whatever ended this may have ended Spark, too
                        context.cancelAllJobs()
        with suppress(Exception):
            code.destroy()

    def close(self) -> None:
        """End the session, its executors and its Java process; a further `map` starts anew."""
        context, self._context = self._context, None
        gateway, self._gateway = self._gateway, None
        scratch, self._scratch = self._scratch, None
        if context is not None:
            with suppress(Exception):  # Java may be gone already
                context.stop()
        if gateway is not None:
            _end(gateway)
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        atexit.unregister(self.close)

    def _answer(self, job: Future[bytes]) -> bytes:
        """Return what a job answers; look from time to time whether anybody is there to do it."""
        alone_since = None
        while True:
            try:
                return job.result(timeout=_LOOK)
            except TimeoutError:
                pass
            if self._master.startswith("local[") or self._workers():
                alone_since = None
                continue
            alone_since = alone_since or time.monotonic()
            if time.monotonic() - alone_since > self._patience:
                with suppress(Exception):
                    self._context.cancelAllJobs()
                raise ConfideError(
                    f"no worker of the Spark cluster has come in {self._patience:.0f} seconds",
                    where=WHERE,
                    fix="See that the cluster's workers run and have cores and memory free.",
                )

    def _workers(self) -> int:
        """Return how many executors there are."""
        try:  # the driver's own block manager is one of them
            return int(self._context._jsc.sc().getExecutorMemoryStatus().size()) - 1
        except Exception:  # noqa: BLE001 - Java is gone: the job's own error says so
            return 1

    # --- the session

    def _started(self) -> Any:
        """Return Spark's context, started once.

        Raises:
            BadInput: no `pyspark` or no Java.
            ConfideError: the cluster does not answer, or does not take us.
        """
        if self._context is not None:
            return self._context
        home = _find(self._home)
        here = self._address()
        self._scratch = Path(tempfile.mkdtemp(prefix="confide-spark-"))  # mode 0700
        atexit.register(self.close)
        with warnings.catch_warnings():
            # The first call to Java imports this, and warns of a pandas that nothing here uses.
            warnings.simplefilter("ignore")
            import pyspark.testing.utils  # noqa: F401
        from pyspark import SparkConf, SparkContext
        from pyspark.java_gateway import launch_gateway

        launch = SparkConf(loadDefaults=False)
        for name in ("spark.driver.memory", "spark.driver.extraClassPath"):
            if name in self._settings:  # Java must know these when it starts
                launch.set(name, self._settings[name])
        before = os.environ.get("SPARK_HOME")
        os.environ["SPARK_HOME"] = str(self._own_home(home))
        try:
            heard = {} if self._debug else {"stdout": DEVNULL, "stderr": DEVNULL}
            self._gateway = launch_gateway(launch, heard)
            conf = SparkConf(loadDefaults=False)
            # Not on Java's command line, which everybody on the machine may read.
            for name, value in {**self._own_settings(here), **self._settings}.items():
                conf.set(name, value)
            self._context = SparkContext(conf=conf, gateway=self._gateway)
        except Exception as error:  # noqa: BLE001 - Java's messages are long, and nobody's advice
            self.close()
            raise ConfideError(
                f"the Spark session did not start ({type(error).__name__})",
                where=WHERE,
                fix="See that the cluster runs this version of Spark and has the same secret.",
            ) from None
        finally:
            if before is None:
                del os.environ["SPARK_HOME"]
            else:
                os.environ["SPARK_HOME"] = before
        # One environment at one path, unless the cluster's is said to lie elsewhere.
        self._context.pythonExec = os.environ.get("PYSPARK_PYTHON") or sys.executable
        return self._context

    def _own_settings(self, here: str) -> dict[str, str]:
        """Return the settings of Spark that this engine needs."""
        settings = {
            "spark.master": self._master,
            "spark.app.name": "confide",
            "spark.submit.deployMode": "client",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.authenticate": "true",
            "spark.authenticate.secret": self._secret,
            "spark.network.crypto.enabled": "true",
            "spark.io.encryption.enabled": "true",
            "spark.eventLog.enabled": "false",
        }
        if self._events is not None:
            self._events.mkdir(parents=True, exist_ok=True, mode=0o700)
            settings["spark.eventLog.enabled"] = "true"
            settings["spark.eventLog.dir"] = self._events.resolve().as_uri()
        if here:
            settings["spark.driver.host"] = here
        if self._master.startswith("local"):
            settings["spark.local.dir"] = str(self._scratch)
            roots = {str(Path(__file__).parents[2]), *os.environ.get("PYTHONPATH", "").split(":")}
            settings["spark.executorEnv.PYTHONPATH"] = ":".join(sorted(roots - {""}))
            # Executors here are children of this process, and would inherit what it was told.
            for name, value in self._environment.items():
                settings[f"spark.executorEnv.{name}"] = value
        return settings

    def _own_home(self, home: Path) -> Path:
        """Return Spark's home; for executors on this machine one whose `work` ends with us."""
        if not self._master.startswith("local-cluster") or self._scratch is None:
            return home
        own = self._scratch / "home"  # Spark writes its executors' logs to SPARK_HOME/work
        own.mkdir()
        for part in ("bin", "jars", "python"):
            (own / part).symlink_to(home / part)
        return own

    def _address(self) -> str:
        """Return this machine's address as the cluster sees it; empty where Spark finds out.

        Raises:
            ConfideError: no master answers.
        """
        if self._master.startswith("local"):
            return "127.0.0.1"
        if not self._master.startswith("spark://"):
            return ""
        for one in self._master.removeprefix("spark://").split(","):
            host, _, port = one.rpartition(":")
            with suppress(OSError), socket.create_connection((host, int(port)), timeout=10) as link:
                return str(link.getsockname()[0])
        raise ConfideError(
            "nobody answers",
            where=self._master,
            fix="Start the cluster, or set CONFIDE_DATA_ENGINE to one that runs.",
        )


# --- on a worker


@dataclass(frozen=True)
class _Outcome:
    """What became of a shard: a value, or an error of ours."""

    value: Any = None
    error: ConfideError | None = None


@dataclass(frozen=True)
class _Task:
    """The work on one shard, as Spark ships it to a worker.

    Attributes:
        version: of the driver's code.
        packages: whose code that is.
        function: pickled; sent to each executor once.
        shard: pickled. Both are opened only where the code is the driver's.
    """

    version: str
    packages: tuple[str, ...]
    function: Any
    shard: bytes

    def __call__(self, nothing: Iterator[int]) -> Iterator[bytes]:
        """Yield the pickled outcome.

        Raises:
            WorkerFault: for every error that is not ours. Spark logs it, and tries again.
        """
        fault = ""
        answer = b""
        try:
            list(nothing)  # Spark's worker process serves another task only when it has read all
            answer = _packed(self._outcome())
        except BaseException as error:  # noqa: BLE001 - its message may quote what was read
            fault = kind_and_place(error)
        if fault:  # outside of the handler: Spark would log the error that was being handled, too
            raise WorkerFault(fault)
        yield answer

    def _outcome(self) -> _Outcome:
        if code_version(self.packages) != self.version:
            return _Outcome(
                error=BadInput(
                    "a Spark worker's code or libraries are not those of this step",
                    where=f"worker {socket.gethostname()}",
                    fix="Start the cluster from the same image or checkout.",
                )
            )
        function = _unpacked(self.function.value)
        shard = _unpacked(self.shard)
        try:
            return _Outcome(value=function(shard))
        except ConfideError as error:
            return _Outcome(error=error)


def _packed(value: Any) -> bytes:
    """Return a value as bytes for another process of this deployment, as a pool's are made."""
    return bytes(ForkingPickler.dumps(value))


def _unpacked(content: bytes) -> Any:
    """Return the value that `_packed` made these bytes of: the cluster's secret vouches for it."""
    return ForkingPickler.loads(content)


def _run(one: Any, task: _Task) -> bytes:
    """Run one shard's job; return its pickled outcome.

    Args:
        one: a data set of one partition.
        task: the shard's.

    Raises:
        BadInput: the worker lacks our code.
        ConfideError: Spark gave up.
    """
    try:
        (answer,) = one.mapPartitions(task).collect()
    except Exception as error:  # noqa: BLE001 - Java's messages are long, and nobody's advice
        told = str(error)
        if _NO_CODE in told:
            raise BadInput(
                "a Spark worker's Python does not find Confide",
                where=WHERE,
                fix="Start the cluster from the same image, or set the workers' PYTHONPATH.",
            ) from None
        found = _FAULT.search(told)
        if found:
            raise ConfideError(
                f"a Spark worker failed on a shard each time: {found[1]}", where=WHERE
            ) from None
        raise ConfideError(
            "Spark lost the worker of a shard more often than it tries again",
            where=WHERE,
            fix="It may have lacked memory: give workers more, or use more shards. The workers' own"
            " logs say how they ended.",
        ) from None
    return bytes(answer)


@functools.cache
def code_version(packages: tuple[str, ...]) -> str:
    """Return a digest of these packages' sources, and of what else shapes results.

    A package that is not there has none: whoever lacks it differs from whoever has it.
    """
    digest = hashlib.sha256(repr(sys.version_info[:2]).encode())
    for name in _SHAPING:
        with suppress(metadata.PackageNotFoundError):
            digest.update(f"{name}=={metadata.version(name)}\n".encode())
    for package in packages:
        found = find_spec(package)
        for folder in (found.submodule_search_locations or []) if found else []:
            for file in sorted(Path(folder).rglob("*.py")):
                content = hashlib.sha256(file.read_bytes()).hexdigest()
                digest.update(f"{package}/{file.relative_to(folder)} {content}\n".encode())
    return digest.hexdigest()


# --- Spark's own files and processes


def _find(home: Path | None) -> Path:
    """Make `pyspark` importable; return Spark's home.

    Raises:
        BadInput: there is no `pyspark`, or no Java.
    """
    if home is None and os.environ.get("SPARK_HOME"):
        home = Path(os.environ["SPARK_HOME"])
    if find_spec("pyspark") is None and home is not None:
        # Installed by pip, Spark's home is the package itself; a distribution keeps it in `python`.
        parent = home.parent if (home / "__init__.py").is_file() else home / "python"
        sys.path += [str(parent), *map(str, (home / "python" / "lib").glob("py4j-*.zip"))]
    found = find_spec("pyspark")
    if found is None or found.origin is None:
        raise BadInput(
            "pyspark is not installed",
            where=WHERE,
            fix="Run `make setup-spark`, or set SPARK_HOME to a Spark 4 of your own.",
        )
    java = os.environ.get("JAVA_HOME")
    if not (Path(java, "bin", "java").is_file() if java else shutil.which("java")):
        raise BadInput(
            "Spark needs Java 17, and there is none",
            where=WHERE,
            fix="On Debian: apt install openjdk-17-jre-headless. Elsewhere, set JAVA_HOME.",
        )
    return home if home is not None else Path(found.origin).parent


def _end(gateway: Any) -> None:
    """End Spark's Java process, and let a later session start another one."""
    from pyspark import SparkContext

    with suppress(Exception):
        gateway.shutdown()
    process = gateway.proc
    if process is not None:
        process.stdin.close()  # by which Java ends
        try:
            process.wait(timeout=10)
        except Exception:  # noqa: BLE001 - whatever it hangs on
            process.kill()
            process.wait()
    with SparkContext._lock:
        SparkContext._gateway = SparkContext._jvm = None
