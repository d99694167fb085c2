"""The stack that `docker/ci` has started."""

import pytest
from running_stack import Stack


@pytest.fixture(scope="session")
def stack() -> Stack:
    return Stack()
