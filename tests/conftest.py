"""Loaded before any test: `dp_core` chooses TensorFlow's products, so it comes first."""

import importlib.util
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import dp_core  # noqa: F401

if importlib.util.find_spec("hypothesis"):  # not everywhere that tests run
    from hypothesis import settings

    # How long an example takes is this machine's affair: a busy one fails no test.
    settings.register_profile("confide", deadline=None)
    settings.load_profile("confide")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let files with long tests come first: of several processes, none is left with one at the end.

    (`scripts/test` gives files to processes in this order.)
    """
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


_MASK = os.umask(0o022)  # of whoever runs the tests
os.umask(_MASK)


@pytest.fixture(autouse=True)
def _the_process_is_as_before() -> Iterator[None]:
    """A step in this process sets its umask and silences libraries for good, as a process may."""
    yield
    os.umask(_MASK)
    logging.captureWarnings(False)
    for handler in logging.root.handlers[:]:
        if type(handler).__module__ == "tasks.runtime.log":
            logging.root.removeHandler(handler)


@contextmanager
def process_restored() -> Iterator[None]:
    """What a step does to its process is undone at the end: its signal handler, its umask."""
    before, mask = signal.getsignal(signal.SIGTERM), os.umask(0o077)
    yield
    signal.signal(signal.SIGTERM, before)
    os.umask(mask)


@pytest.fixture
def as_in_a_process() -> Iterator[None]:
    """The test runs steps in its own process, which stays as it was."""
    with process_restored():
        yield


@pytest.fixture(scope="module")
def e2e_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The home of a deployment for all tests of a file, and of no other setting."""
    with process_restored(), pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith("CONFIDE_")]:
            patch.delenv(name)
        home = tmp_path_factory.mktemp("e2e") / "home"
        patch.setenv("CONFIDE_HOME", str(home))
        yield home
