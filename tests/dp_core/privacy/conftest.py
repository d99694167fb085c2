"""Other processes, for tests of what happens when several meet."""

import multiprocessing
from multiprocessing.context import ForkServerContext

import pytest


@pytest.fixture
def other_processes() -> ForkServerContext:
    """The way to start processes: from a server that has the slow imports done.

    They then meet where the test wants them to, not in the import of scipy; and nothing forks a
    process in which other tests have started TensorFlow's threads. The server is one for the
    whole session, so its imports are named here for all.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["pytest", "dp_core.privacy.ledger", "dp_core.privacy.discrete_gaussian"]
    )
    return context
