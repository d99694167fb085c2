"""Maps a device name to a TensorFlow distribution strategy; all devices share one code path."""

from __future__ import annotations

import ctypes
import re
import sys
from typing import Any

import tensorflow as tf

from dp_core.errors import BadInput

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8  # <malloc.h>
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory; return False on other C libraries."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {
        _MMAP_THRESHOLD: _NEVER,
        _TRIM_THRESHOLD: _NEVER,
        _TOP_PAD: 1 << 26,
        _ARENA_MAX: 1,  # other arenas cannot hold blocks above 64 MiB
    }
    return all(mallopt(option, value) == 1 for option, value in settings.items())


_MOCK = re.compile(r"mock-tpu:([1-9][0-9]?)")


def replicas(device: str) -> int:
    """Return N of `mock-tpu:N`, else 1; the number of real GPUs or TPUs is known only later."""
    mock = _MOCK.fullmatch(device)
    return int(mock[1]) if mock else 1


def configure(device: str) -> None:
    """Prepare TensorFlow for a device. Call it before any TensorFlow operation.

    `mock-tpu:N` splits the CPU into N logical devices.

    Raises:
        BadInput: TensorFlow is already running with fewer devices.
    """
    wanted = replicas(device)
    if wanted == 1:
        return
    cpu = tf.config.list_physical_devices("CPU")[0]
    current = tf.config.get_logical_device_configuration(cpu)
    if current is not None and len(current) >= wanted:
        return
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(wanted)]
        )
    except RuntimeError:
        raise BadInput(
            "TensorFlow is already running with fewer devices",
            where=device,
            fix="Call configure() before any TensorFlow operation.",
        ) from None


def strategy_for(device: str) -> Any:
    """Return the distribution strategy of `cpu`, `gpu`, `tpu` or `mock-tpu:N`.

    Float32 products are then computed in float32 on all devices. By default GPUs round the factors
    to TensorFloat-32 and TPUs to bfloat16, and the bound on norms (`clipping.gram`) would fail.

    Raises:
        BadInput: unknown device name, or an absent device.
    """
    keep_freed_memory()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    if device == "cpu":
        return tf.distribute.OneDeviceStrategy("/cpu:0")
    if _MOCK.fullmatch(device):
        configure(device)
        return tf.distribute.MirroredStrategy(
            [f"/cpu:{i}" for i in range(replicas(device))],
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        )
    if device == "gpu":
        if not tf.config.list_logical_devices("GPU"):
            raise BadInput("no GPU that TensorFlow can use", where=device, fix="Choose cpu.")
        return tf.distribute.MirroredStrategy()
    if device == "tpu":
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect()
        except (ValueError, tf.errors.OpError):
            raise BadInput("no TPU found", where="tpu", fix="Choose cpu or mock-tpu:N.") from None
        return tf.distribute.TPUStrategy(resolver)
    raise BadInput(f"{device!r} is not a device", fix="Use cpu, gpu, tpu or mock-tpu:N.")


def single_device(device: str) -> str:
    """Return the single TensorFlow device that fine-tuning and evaluation use."""
    strategy_for(device)
    return {"gpu": "/gpu:0", "tpu": "/tpu:0"}.get(device, "/cpu:0")
