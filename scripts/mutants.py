#!/usr/bin/env python3
"""Plant known bugs, one at a time, and check that their tests fail.

    make mutants                     # all bugs, on two cores
    make mutants ONLY=clipping       # one room, or every bug whose name contains the text
    make mutants SHARE=today/8       # an eighth of the bugs, a different one each day, as in CI

`tests/mutants/ROOM.toml` holds the bugs as data: `name`, `file`, its present text `now` (occurs
exactly once), the text to be `planted`, the `tests` of which one must fail, and `why` it matters.
The exit code is 1 if a bug survives, if its text is stale, or if its tests fail without it.

To save time, this process imports the slow libraries once and forks. Every fork imports the project
from a copy of the tree with one planted bug. Bytecode is compiled beforehand and never written
again, because a file may change twice within one second.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import faulthandler
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from scripts.shares import numbered, share_of

ROOT = Path(__file__).resolve().parent.parent
DATA = Path("tests/mutants")
PATIENCE = 300.0  # seconds for one run of tests
_FIELDS = {"name", "file", "now", "planted", "tests", "why"}
_NO_FINDING = (SyntaxError, NameError, ImportError)  # the planted text itself is broken
_WARM = (
    *("numpy", "scipy.optimize", "scipy.stats", "scipy.fft", "scipy.special", "numba"),
    *("tensorflow", "dp_accounting.pld", "dp_accounting.rdp", "tokenizers", "safetensors.numpy"),
    *("sklearn.linear_model", "sklearn.metrics", "sklearn.pipeline"),
    *("sqlalchemy", "pydantic", "cryptography.hazmat.primitives.ciphers", "hypothesis"),
)
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
_PYTEST = ("-x", "-q", "-rN", "-p", "no:cacheprovider", "-p", "no:randomly", "--no-header")
_ALREADY = (
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
)  # for modules imported before the fork


class Stale(Exception):
    """The bugs as data do not match the code."""


@dataclass(frozen=True)
class Mutant:
    """A bug to be planted."""

    room: str
    name: str
    file: str
    now: str
    planted: str
    tests: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Job:
    """Tests to be run on the tree, with or without a planted bug."""

    tests: tuple[str, ...]
    mutant: Mutant | None = None


@dataclass(frozen=True)
class Outcome:
    """The result of a job.

    Attributes:
        said: passed, failed, or the reason why the job is neither.
        by: the failed tests.
        log: the end of pytest's output.
    """

    job: Job
    said: str
    seconds: float
    by: tuple[str, ...] = ()
    log: str = ""


def load(root: Path) -> list[Mutant]:
    """Return every bug, room by room.

    Raises:
        Stale: some bugs cannot be planted or tested; the message names all of them.
    """
    found, wrong = [], []
    for path in sorted((root / DATA).glob("*.toml")):
        for entry in tomllib.loads(path.read_text()).get("bug", []):
            if set(entry) != _FIELDS:
                wrong.append(f"{path.name}: {entry.get('name')}: needs {sorted(_FIELDS)}")
                continue
            found.append(Mutant(path.stem, **entry | {"tests": tuple(entry["tests"])}))
    names = [mutant.name for mutant in found]
    wrong += [
        f"two bugs are called {name!r}" for name in sorted(set(names)) if names.count(name) > 1
    ]
    wrong += [f"{m.room}: {m.name}: {what}" for m in found if (what := stale(root, m))]
    if wrong:
        raise Stale("\n".join(wrong))
    return found


def stale(root: Path, mutant: Mutant) -> str:
    """Return why the bug cannot be planted in this tree, or an empty string."""
    path = root / mutant.file
    if not path.is_file():
        return f"there is no {mutant.file}"
    text = path.read_text()
    if (count := text.count(mutant.now)) != 1:
        return f"its `now` occurs {count} times in {mutant.file}, not once"
    if mutant.now == mutant.planted:
        return "nothing is planted"
    try:
        ast.parse(text.replace(mutant.now, mutant.planted), mutant.file)
    except SyntaxError as error:
        return f"the planted text is not Python: {error}"
    if not mutant.tests:
        return "it names no test"
    missing = [test for test in mutant.tests if not (root / test.partition("::")[0]).is_file()]
    return f"there is no {missing[0]}" if missing else ""


def chosen(mutants: Sequence[Mutant], only: str) -> list[Mutant]:
    """Return the bugs of a room, or with a text in their name."""
    rooms = {mutant.room for mutant in mutants}
    return [m for m in mutants if only == m.room or (only not in rooms and only in m.name)]


def baseline(mutants: Iterable[Mutant]) -> list[Job]:
    """Return the tests of all bugs, as one job per test file."""
    files: dict[str, dict[str, None]] = {}
    for mutant in mutants:
        for test in mutant.tests:
            files.setdefault(test.partition("::")[0], {})[test] = None
    return [Job((file,) if file in tests else tuple(tests)) for file, tests in files.items()]


def files_of_tree() -> list[str]:
    """Return the files that git tracks or would not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    answer = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603
    return [name for name in answer.stdout.split("\0") if name]


def copy_of_tree(target: Path) -> Path:
    """Copy the sources."""
    target.mkdir(parents=True)
    for name in files_of_tree():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


class Tree:
    """A copy of the sources in which one job runs at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = copy_of_tree(folder / "tree")
        compileall.compile_dir(self._folder, quiet=2)
        self._log, self._answer = folder / "log", folder / "answer.json"
        self._job: Job | None = None
        self._began = 0.0

    def start(self, job: Job) -> int:
        """Fork a process that runs the job's tests; return its number."""
        self._job, self._began = job, time.monotonic()
        self._answer.unlink(missing_ok=True)
        if mutant := job.mutant:
            path = self._folder / mutant.file
            path.write_text(path.read_text().replace(mutant.now, mutant.planted))
            os.utime(path, (0, 0))  # no bytecode has this time
        sys.stdout.flush()
        sys.stderr.flush()
        # Under pytest, a thread waits to report a hang. A fork does not have this thread, and
        # pytest would wait for it forever.
        faulthandler.cancel_dump_traceback_later()
        child = os.fork()
        if child == 0:
            code = 70
            try:
                code = self._run(job.tests)
            except BaseException:  # noqa: BLE001 - printed; the fork must end here
                traceback.print_exc()
            finally:
                os._exit(code)
        return child

    def ended(self, code: int) -> Outcome:
        """Remove the bug; return the outcome of its tests."""
        assert self._job is not None  # noqa: S101
        job, seconds = self._job, time.monotonic() - self._began
        if mutant := job.mutant:
            shutil.copy2(ROOT / mutant.file, self._folder / mutant.file)
        log = "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])
        try:
            answer = json.loads(self._answer.read_text())
        except (OSError, ValueError):
            return Outcome(job, f"pytest was ended from outside ({code})", seconds, log=log)
        by = tuple(answer.pop("failed"))
        return Outcome(job, verdict(code, **answer), seconds, by, log)

    @property
    def late(self) -> bool:
        """Whether the job has exceeded its time limit."""
        return time.monotonic() - self._began > PATIENCE

    def _run(self, tests: tuple[str, ...]) -> int:
        os.setsid()  # processes that the tests start are killed with them
        gc.freeze()  # a collection would copy the memory of all libraries
        os.chdir(self._folder)
        with self._log.open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.path.insert(0, str(self._folder))
        os.environ |= {"PYTHONPATH": str(self._folder), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        import pytest

        seen = _Seen()
        scratch = self._folder.parent / "tmp"
        shutil.rmtree(scratch, ignore_errors=True)
        arguments = [*_PYTEST, *_ALREADY, f"--basetemp={scratch}", *tests]
        code = int(pytest.main(arguments, plugins=[seen]))
        self._answer.write_text(json.dumps(vars(seen)))
        return code


class _Seen:
    """A pytest plugin that records passed tests, failed tests and the kinds of errors."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: list[str] = []
        self.errors: list[str] = []

    def pytest_sessionstart(self) -> None:
        """Let Hypothesis stop at the first failing example, without shrinking it."""
        if "hypothesis" in sys.modules:
            from hypothesis import Phase, settings

            only = (Phase.explicit, Phase.generate)
            settings.register_profile("planted", settings.default, phases=only, database=None)
            settings.load_profile("planted")

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.passed += report.when == "call" and report.passed
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_exception_interact(self, call: Any, report: Any) -> None:
        if report.when in ("setup", "call"):
            broken = isinstance(call.excinfo.value, _NO_FINDING)
            self.errors.append(call.excinfo.type.__name__ if broken else "")


def verdict(code: int, passed: int, errors: list[str]) -> str:
    """Return `passed`, `failed`, or why the tests are inconclusive."""
    if code == 0:
        return "passed" if passed else "every test was skipped"
    if code == 1 and errors:
        return f"the planted text is broken: {errors[0]}" if any(errors) else "failed"
    return f"pytest could not run the tests (exit code {code})"


def run_all(
    jobs: Sequence[Job], trees: Sequence[Tree], told: Callable[[Outcome], None]
) -> list[Outcome]:
    """Run every job, at most one per tree at a time."""
    waiting, free, outcomes = list(reversed(jobs)), list(trees), []
    running: dict[int, Tree] = {}
    try:
        while waiting or running:
            while waiting and free:
                tree = free.pop()
                running[tree.start(waiting.pop())] = tree
            for child, tree in list(running.items()):
                number, status = os.waitpid(child, os.WNOHANG)
                if not number and tree.late:
                    os.killpg(child, signal.SIGKILL)
                    number, status = os.waitpid(child, 0)
                if not number:
                    continue
                _end_group(child)
                outcome = tree.ended(os.waitstatus_to_exitcode(status))
                outcomes.append(outcome)
                told(outcome)
                free.append(running.pop(child))
            time.sleep(0.02)
    finally:
        for child in running:  # only left if this process was interrupted
            _end_group(child)
    return outcomes


def _end_group(child: int) -> None:
    """End processes that the tests left running."""
    try:
        os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def warm() -> None:
    """Import slow third-party libraries without starting threads of TensorFlow."""
    for name in _ONE_THREAD:
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    plugins = [entry.module for entry in metadata.entry_points(group="pytest11")]
    for name in ("pytest", *_WARM, *plugins):
        try:
            importlib.import_module(name)
        except ImportError:  # a fork that needs the library reports the error
            continue


def failures(mutants: Sequence[Mutant], trees: Sequence[Tree]) -> Iterator[Outcome]:
    """Run the tests without bugs, then with each; print a table and yield unexpected outcomes."""
    print("First, the tests without any bug.", flush=True)
    without = run_all(baseline(mutants), trees, lambda outcome: None)
    yield from (outcome for outcome in without if outcome.said != "passed")
    width = max(len(mutant.name) for mutant in mutants)

    def told(outcome: Outcome) -> None:
        mutant = outcome.job.mutant
        assert mutant is not None  # noqa: S101
        print(
            f"{mutant.room:<12} {mutant.name:<{width}} {said(outcome):<9} {outcome.seconds:6.1f} s"
        )
        sys.stdout.flush()

    planted = run_all([Job(mutant.tests, mutant) for mutant in mutants], trees, told)
    yield from (outcome for outcome in planted if outcome.said != "failed")


def said(outcome: Outcome) -> str:
    """Return the table's word for the outcome of a bug's tests."""
    return {"failed": "caught", "passed": "SURVIVED"}.get(outcome.said, outcome.said.upper())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen bugs; return the exit code."""
    parser = argparse.ArgumentParser(description="Plant known bugs and see that tests fail.")
    parser.add_argument("--only", default="", help="a room, or a part of a bug's name")
    parser.add_argument(
        "--share", default="1/1", help="K/N, or today/N: every N-th bug, from the K-th"
    )
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(arguments)
    try:
        every = load(ROOT)
    except Stale as error:
        print(f"The data in {DATA} do not follow the code:\n{error}", file=sys.stderr)
        return 1
    mutants = share_of(chosen(every, options.only), numbered(options.share))
    if not mutants:
        print("No such bug.", file=sys.stderr)
        return 1
    began = time.monotonic()
    warm()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [Tree(Path(folder) / str(i)) for i in range(options.workers)]
        wrong = list(failures(mutants, trees))
    for outcome in wrong:
        name = outcome.job.mutant.name if outcome.job.mutant else "without any bug"
        print(f"\n== {name}: {outcome.said}: {' '.join(outcome.job.tests)}\n{outcome.log}")
    caught = len(mutants) - sum(outcome.job.mutant is not None for outcome in wrong)
    print(f"\n{caught} of {len(mutants)} caught, {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
