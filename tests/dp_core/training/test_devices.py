import subprocess
import sys

import pytest
import tensorflow as tf

from dp_core.errors import BadInput
from dp_core.training import devices


def test_number_of_devices_follows_from_the_device_name():
    assert [devices.replicas(d) for d in ("cpu", "gpu", "mock-tpu:1", "mock-tpu:8")] == [1, 1, 1, 8]
    for device, number in (("cpu", 1), ("mock-tpu:2", 2)):
        assert devices.strategy_for(device).num_replicas_in_sync == number
    assert (
        devices.single_device("mock-tpu:2") == devices.single_device("cpu") == "/cpu:0"
    )  # of fine-tuning


@pytest.mark.parametrize("name", ["mock-tpu:0", "mock-tpu", "cuda", ""])
def test_unknown_device_is_refused(name):
    with pytest.raises(BadInput, match="is not a device"):
        devices.strategy_for(name)


def test_more_devices_than_were_configured_are_refused():
    tf.constant(0.0)
    with pytest.raises(BadInput, match="already running with fewer devices"):
        devices.configure("mock-tpu:64")


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="there is a GPU")
def test_missing_gpu_is_reported_in_one_line():
    with pytest.raises(BadInput, match="no GPU"):
        devices.strategy_for("gpu")


@pytest.mark.parametrize(
    "error", [ValueError("no metadata"), tf.errors.NotFoundError(None, None, "")]
)
def test_missing_tpu_is_reported_in_one_line(monkeypatch, error):
    def connect():
        raise error

    monkeypatch.setattr(tf.distribute.cluster_resolver.TPUClusterResolver, "connect", connect)
    with pytest.raises(BadInput, match=r"no TPU found\. Choose cpu or mock-tpu:N"):
        devices.strategy_for("tpu")


def test_float32_products_are_not_rounded_to_fewer_bits():
    tf.config.experimental.enable_tensor_float_32_execution(True)
    devices.strategy_for("cpu")
    assert not tf.config.experimental.tensor_float_32_execution_enabled()


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


@pytest.mark.skipif(not devices.keep_freed_memory(), reason="no glibc here")
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
    assert not devices.keep_freed_memory()
