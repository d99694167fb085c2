"""A machine of a Ray cluster: a process that starts Ray's processes and ends with them.

    python -m dp_core.cluster.node head PORT FOLDER SECRETS
    python -m dp_core.cluster.node worker HOST:PORT FOLDER SECRETS
    python -m dp_core.cluster.node step HOST:PORT FOLDER SECRETS
    python -m dp_core.cluster.node local CPUS FOLDER SECRETS
    python -m dp_core.cluster.node secrets FOLDER
    python -m dp_core.cluster.node certificate FOLDER SECRETS ADDRESS...

`head` and `worker` are the containers of a cluster. `step` joins a step's machine to a cluster: a
driver needs a node of the cluster on its machine, on which no task may run. `local` is a cluster
that consists of this machine. Both print the cluster's address when they are ready, and end when
their standard input ends, which happens even if the step crashes. `secrets` makes a cluster's
secrets, and `certificate` a member's certificate if another program starts Ray there (KubeRay).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from dp_core.cluster.certificates import address_towards, make_secrets, member_environment

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # Ray would send usage statistics to its makers
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a call without a connection would start an open cluster
    "RAY_DEDUP_LOGS": "0",
    "RAY_task_oom_retries": "3",  # by default a task that lacks memory is retried without limit
}
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - Linux's shared memory of all processes
_OBJECTS = 0.6  # share of the free shared memory
_LEAST_OBJECTS = 80_000_000  # bytes; Ray refuses less
_PARENT_DEATH = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


def main(words: list[str]) -> int:
    """Run the command; return the exit code."""
    os.umask(0o077)
    match words:
        case ["secrets", folder]:
            make_secrets(Path(folder))
            return 0
        case ["certificate", folder, secrets, *addresses]:
            member_environment(Path(secrets), Path(folder), *addresses)
            return 0
        case [("head" | "worker" | "step" | "local") as kind, target, folder, secrets]:
            pass
        case _:
            sys.exit(__doc__)
    Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
    host = (
        target.rpartition(":")[0] if ":" in target else "192.0.2.1"
    )  # any address: nothing is sent
    address = address_towards(host)
    os.environ |= QUIET | member_environment(Path(secrets), Path(folder), address)
    if kind == "local":
        return _local(int(target), folder, address)
    common = ["start", "--block", "--disable-usage-stats", f"--node-ip-address={address}"]
    common += [f"--object-store-memory={_object_memory()}"]
    if kind == "head":
        options = ["--head", f"--port={target}", "--num-cpus=0", "--include-dashboard=false"]
        return _run([*common, *options])
    if kind == "worker":
        return _run([*common, f"--address={target}"])
    return _run([*common, f"--address={target}", "--num-cpus=0"], step_of=target)


def _local(cpus: int, folder: str, address: str) -> int:
    """Start a cluster of this machine, print its address, and wait for the end of the input."""
    import ray

    ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=_object_memory(),
        _node_ip_address=address,
        _temp_dir=folder,
    )
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.buffer.read()
    ray.shutdown()
    return 0


def _object_memory() -> int:
    """Return the bytes for objects. Without this bound, a small /dev/shm moves them to the disk."""
    return max(_LEAST_OBJECTS, int(_OBJECTS * shutil.disk_usage(_SHARED_MEMORY).free))


def _run(words: list[str], *, step_of: str = "") -> int:
    """Run Ray's command as a child that ends with this process; return its exit code.

    Args:
        words: arguments of the command.
        step_of: address of the cluster that this machine joins for a step.
    """
    with subprocess.Popen(  # noqa: S603
        [sys.executable, "-u", "-m", "ray.scripts.scripts", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_end_with_parent,  # safe: this process has no threads yet
    ) as process:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        if step_of:
            threading.Thread(target=_after_input, args=(process.terminate,), daemon=True).start()
        assert process.stdout is not None  # noqa: S101 - a pipe
        for line in process.stdout:
            print(line, end="", file=sys.stderr)
            if step_of and "Ray runtime started" in line:
                print(step_of, flush=True)
        return process.wait()


def _after_input(end: Callable[[], None]) -> None:
    sys.stdin.buffer.read()
    end()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
