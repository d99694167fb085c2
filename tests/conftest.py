"""Loaded before any test: imports `dp_core` first, because it sets variables of TensorFlow."""

import importlib.util
import logging
import os
import signal
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # the Keras of tensorflow-privacy

import dp_core  # noqa: F401
from scripts.shares import numbered, share_of

if importlib.util.find_spec("hypothesis"):  # some test environments lack it
    from hypothesis import settings

    # No deadline, because examples are slow on a busy machine.
    settings.register_profile("confide", deadline=None)
    settings.load_profile("confide")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share", default="1/1", help="K/N: every N-th test from the K-th; or today/N"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose today's share once, for all worker processes; declare the mark `cases`."""
    config.option.share = numbered(config.option.share)
    config.addinivalue_line("markers", "cases: has a table of cases in `cases.toml` of its folder")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with the mark `cases` once for each row of its table."""
    if metafunc.definition.get_closest_marker("cases"):
        tables = tomllib.loads(metafunc.definition.path.with_name("cases.toml").read_text())
        table = tables[metafunc.definition.originalname]
        metafunc.parametrize(table["names"], table["rows"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a share of the tests, and run files with slow tests first.

    `scripts/test` distributes files to processes in this order, so that no process starts a slow
    file when the others have finished.
    """
    kept = share_of(items, config.option.share)
    if deselected := set(items).difference(kept):
        config.hook.pytest_deselected(items=list(deselected))
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items[:] = sorted(kept, key=lambda item: item.path not in long)


_MASK = os.umask(0o022)  # the umask of the user
os.umask(_MASK)


@pytest.fixture(autouse=True)
def _the_process_is_as_before() -> Iterator[None]:
    """Restore umask and logging, which a step changes permanently in its process."""
    yield
    os.umask(_MASK)
    logging.captureWarnings(False)
    for handler in logging.root.handlers[:]:
        if type(handler).__module__ == "tasks.runtime.log":
            logging.root.removeHandler(handler)


@contextmanager
def process_restored() -> Iterator[None]:
    """Context manager that restores the SIGTERM handler and the umask that a step has changed."""
    before, mask = signal.getsignal(signal.SIGTERM), os.umask(0o077)
    yield
    signal.signal(signal.SIGTERM, before)
    os.umask(mask)


@pytest.fixture
def as_in_a_process() -> Iterator[None]:
    """Restore the test process after steps have run in it."""
    with process_restored():
        yield


@pytest.fixture(scope="module")
def e2e_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The home of a deployment without other settings, shared by all tests of a file."""
    with process_restored(), pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith("CONFIDE_")]:
            patch.delenv(name)
        home = tmp_path_factory.mktemp("e2e") / "home"
        patch.setenv("CONFIDE_HOME", str(home))
        yield home
