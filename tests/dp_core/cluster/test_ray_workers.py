import gc
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from child_processes import alive, wait_for
from cluster_functions import Echo, Gate, HostGate, HostRefusal, broken, environment, process
from map_conformance import MapConformance, Squared, corpora, expected

from dp_core.cluster.ray_cluster import RayCluster
from dp_core.cluster.shard_map import ShardMap
from dp_core.errors import BadInput, ConfideError

__all__ = ["corpora", "expected"]

ROOT = Path(__file__).parents[3]
PLANTED = "Zebulon Quist"
PASSWORD = "planted-password"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    # Ray leaves sockets and files to the garbage collector.
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning",
        "ignore::pytest.PytestUnraisableExceptionWarning",
        "ignore::FutureWarning:ray.*",
    ),
]


@pytest.fixture(scope="module")
def ray() -> Iterator[RayCluster]:
    """A cluster of two workers; this process has a password that they must not receive."""
    with pytest.MonkeyPatch.context() as patch:
        kept = dict(os.environ) | {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"}
        patch.setenv("CONFIDE_LEDGER", f"postgresql://ledger:{PASSWORD}@host/ledger")
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            patch.delenv(name)
        cluster = RayCluster("local:2", environment=kept, packages=("dp_core", "tasks"))
        yield cluster
        cluster.close()
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]


class TestConformance(MapConformance):
    @pytest.fixture
    def place(self, ray: RayCluster) -> ShardMap:
        return ray


def test_shards_are_computed_in_both_workers(ray):
    processes = set(ray.map(process, range(8)))
    assert len(processes) == 2 and os.getpid() not in processes


def calls(folder: Path) -> list[tuple[int, int]]:
    names = [file.name for file in folder.iterdir() if file.name != "open"]
    return sorted((int(shard), int(pid)) for shard, pid in (name.split(".") for name in names))


def test_shard_of_killed_worker_is_counted_once_by_another_worker(ray, tmp_path):
    with ThreadPoolExecutor(1) as threads:
        job = threads.submit(lambda: list(ray.map(Gate(tmp_path), range(6))))
        wait_for(lambda: len({pid for _, pid in calls(tmp_path)}) == 2, 60)
        shard, victim = calls(tmp_path)[0]
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: len({pid for _, pid in calls(tmp_path)}) == 3, 60)
        (tmp_path / "open").touch()
        assert job.result(60) == [2 * n for n in range(6)]
    assert len([number for number, _ in calls(tmp_path) if number == shard]) == 2


def test_killed_host_restarts_and_computes_the_same_update(ray, tmp_path):
    hosts = ray.hosts(2, "cpu")
    hosts.start([HostGate(tmp_path), HostGate(tmp_path)])
    gc.collect()  # the host's function must survive until a restart
    shared = [np.arange(70_000, dtype=np.float32)]
    with ThreadPoolExecutor(1) as threads:
        update = threads.submit(lambda: list(hosts.call(shared, [3, 4])))
        wait_for(lambda: len(calls(tmp_path)) == 2, 60)
        (_, survivor), (_, victim) = calls(tmp_path)
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: len(calls(tmp_path)) == 3, 60)
        (tmp_path / "open").touch()
        values = update.result(60)
    assert [argument for _, argument, _ in values] == [3, 4]
    assert values[0][2] == survivor != values[1][2] != victim
    for received, _, _ in values:
        np.testing.assert_array_equal(received, shared)
    assert [argument for _, argument, _ in hosts.call(shared, [5, 6])] == [5, 6]
    hosts.end()


def test_error_of_a_host_is_raised_unchanged(ray):
    hosts = ray.hosts(1, "cpu")
    hosts.start([HostRefusal()])
    with pytest.raises(BadInput, match="a host reads other rows than the step"):
        list(hosts.call(0, [0]))
    hosts.end()


def test_cluster_without_the_device_is_refused(ray):
    with pytest.raises(ConfideError, match="no machine of the cluster has a TPU"):
        ray.hosts(2, "tpu")


def test_files_of_ray_and_errors_contain_no_private_text(ray):
    with pytest.raises(ConfideError, match=r"ValueError at .*cluster_functions.py:\d+") as caught:
        list(ray.map(broken, [PLANTED]))
    assert PLANTED not in str(caught.value)
    assert list(ray.map(Echo(PLANTED), [PLANTED])) == [PLANTED + PLANTED]
    files = [f for f in ray._scratch.rglob("*") if f.is_file() and not f.is_symlink()]
    assert any(file.name.startswith("worker-") for file in files)
    assert any(file.name.startswith("raylet") for file in files)
    token = (ray._scratch / "secrets" / "token").read_bytes()
    for file in files:
        content = file.read_bytes()
        assert b"Zebulon" not in content, file
        assert token not in content or file.name == "token", file
    assert ray._scratch.stat().st_mode & 0o077 == 0


def test_tables_of_ray_contain_no_private_text(ray):
    """A dashboard would show these tables; tasks, actors and objects have no text."""
    assert list(ray.map(Echo(PLANTED), [PLANTED])) == [PLANTED + PLANTED]
    from ray._private import state

    wait_for(lambda: "map_shard" in repr(state.state.chrome_tracing_dump()), 60)
    tables = repr([state.jobs(), state.actors(), state.state.chrome_tracing_dump()])
    assert "Zebulon" not in tables


def test_workers_receive_neither_the_token_nor_the_environment_of_the_step(ray):
    (variables,) = ray.map(environment, [""])
    token = (ray._scratch / "secrets" / "token").read_text()
    assert token not in "".join(variables.values())
    assert processes_of("raylet") and not processes_of(token)
    assert PASSWORD in os.environ["CONFIDE_LEDGER"]
    assert PASSWORD not in "".join(variables.values())
    assert variables["RAY_AUTH_MODE"] == "token" and variables["RAY_USE_TLS"] == "1"


def test_ports_of_ray_refuse_clients_without_a_certificate(ray):
    import ray as module

    host, _, port = module.get_runtime_context().gcs_address.rpartition(":")
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
        answered = connection.recv(100)
    assert b"HTTP" not in answered and not answered.startswith(b"\x00\x00")  # no HTTP/2 settings
    with (
        pytest.raises((ssl.SSLError, ConnectionError)),
        socket.create_connection((host, int(port)), timeout=10) as connection,
        stranger.wrap_socket(connection) as link,
    ):
        link.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        if not link.recv(100):
            raise ConnectionError


def test_cluster_ends_with_its_step_even_if_the_step_is_killed():
    program = """
import time
from dp_core.cluster.ray_cluster import RayCluster
cluster = RayCluster("local:1")
list(cluster.map(abs, [1, 2]))
print(cluster._node.pid, cluster._scratch, flush=True)
time.sleep(600)
"""
    clean = {n: v for n, v in os.environ.items() if not n.startswith("RAY_")}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=clean
    ) as step:
        node, scratch = step.stdout.readline().split()
        step.kill()
    wait_for(lambda: not alive(int(node)), 60)
    wait_for(lambda: not processes_of(scratch), 60)


def processes_of(text: str) -> list[str]:
    """Return the command lines of all processes that contain a text."""
    lines = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # the process has ended
            lines.append(each.read_text())
    return [line for line in lines if text in line]


def test_closed_cluster_leaves_no_processes_or_files(ray):
    assert list(ray.map(Squared(), [2])) == [4]
    scratch = ray._scratch
    assert scratch is not None and processes_of(str(scratch))
    ray.close()
    assert not scratch.exists()
    wait_for(lambda: not processes_of(str(scratch)), 60)
