"""The clocks of the benchmarks: wall time and processor time."""

from __future__ import annotations

import time

import numpy as np


def clocks() -> np.ndarray:
    """Return seconds of wall time, and processor seconds of this process on all cores together."""
    return np.array([time.perf_counter(), time.process_time()])
