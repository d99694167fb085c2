"""Loaded before any test: `dp_core` chooses TensorFlow's products, so it comes first."""

import importlib.util
import logging
from collections.abc import Iterator

import pytest

import dp_core  # noqa: F401

if importlib.util.find_spec("hypothesis"):  # not everywhere that tests run
    from hypothesis import settings

    # How long an example takes is this machine's affair: a busy one fails no test.
    settings.register_profile("confide", deadline=None)
    settings.load_profile("confide")


@pytest.fixture(autouse=True)
def _libraries_are_heard_as_before() -> Iterator[None]:
    """A step that a test runs in this process silences libraries for good, as a process may."""
    yield
    logging.captureWarnings(False)
    for handler in logging.root.handlers[:]:
        if type(handler).__module__ == "tasks.runtime.messages":
            logging.root.removeHandler(handler)
