import multiprocessing
from multiprocessing.context import ForkServerContext

import pytest


@pytest.fixture
def other_processes() -> ForkServerContext:
    """The context that starts processes, by forking a server that has done the slow imports.

    The processes then compete at the point that a test examines, not in the import of scipy, and
    no process is forked after other tests have started TensorFlow's threads. The session has only
    one server, so its imports are listed here for all tests.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["pytest", "dp_core.privacy.ledger", "dp_core.privacy.discrete_gaussian"]
    )
    return context
