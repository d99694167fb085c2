"""Freed memory stays with the process if the C library supports it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dp_core.training.devices import keep_freed_memory

_SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from dp_core.training.devices import (keep_freed_memory)

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

if sys.argv[1] == "keep":
    assert keep_freed_memory()
before = resident()
a = np.ones(100 << 20, np.uint8)
del a
print(resident() - before)
"""


@pytest.mark.skipif(not keep_freed_memory(), reason="no glibc here")
def test_freed_memory_is_kept_only_on_request():
    kept, returned = (
        int(
            subprocess.run(
                [sys.executable, "-c", _SCRIPT, w], capture_output=True, check=True
            ).stdout
        )
        for w in ("keep", "leave")
    )
    assert kept > 90
    assert returned < 10


def test_other_platforms_report_that_memory_is_not_kept(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()
