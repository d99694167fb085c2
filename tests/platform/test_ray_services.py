"""A private model on the stack's Ray cluster, with workers killed in a count and in an update.

`docker/ci` starts the stack, as for `test_stack.py`; this file starts the cluster. The kills are
synchronised without fixed delays: the object store is paused while shards are counted, and a worker
is killed while its host process computes an update.
"""

import base64
import json
import subprocess
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from child_processes import wait_for
from running_stack import PROJECT, TAG, TINY, Services, on_the_stack

from tasks.protocol.job import job_steps
from tasks.protocol.least_privilege import environment_for
from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import StepSpec

pytestmark = on_the_stack("Ray is NOT tried")
ADDRESS = "ray-head:6379"
CACHE = "/var/lib/confide/cache/shards"
SHARDS = 192  # Docker takes as long for a pause as the workers take for some of them
PATIENCE = 600.0  # seconds, on a busy machine
SPECS = job_steps(
    JobSettings(
        **TINY
        | {
            "synthetic_patients": 1500,
            "declared_units": 1500,
            "vocabulary_source": "private",
            "nonprivate": False,
            "corpus_shards": SHARDS,
            "data_version": f"ray-{uuid.uuid4().hex[:8]}",
        }
    )
)
# The steps after the vocabulary that the private training needs.
TO_THE_MODEL = (
    "public_corpus",
    "canaries",
    "private_store",
    "public_store",
    "Public text only / pretraining",
)


def docker(*words: str) -> str:
    answer = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def waited(what: str, condition: Callable[[], Any]) -> Any:
    return wait_for(condition, PATIENCE, what=what, pause=0.1)


class Cluster(Services):
    """The Ray cluster next to the stack's database and object store."""

    def __init__(self) -> None:
        described = json.loads(self.compose("--profile", "ray", "config", "--format", "json"))
        # this service has the environment of a charging step
        self.step = described["services"]["prepare"]

    def up(self) -> None:
        names = ("storage", "postgres", "ray-head", "ray-worker")
        self.compose("--profile", "ray", "up", "--detach", "--wait", *names)

    def down(self) -> None:
        self.compose("--profile", "ray", "rm", "--stop", "--force", "ray-head", "ray-worker")

    def workers(self) -> list[str]:
        return self.compose("--profile", "ray", "ps", "--quiet", "ray-worker").split()

    def counted(self) -> dict[str, set[str]]:
        """Return the shards that each running worker has opened so far."""
        find = f"ls {CACHE}/*/shard.parquet 2>/dev/null || true"
        return {w: set(docker("exec", w, "sh", "-c", find).split()) for w in self.workers()}

    def until_another_shard(self, worker: str) -> subprocess.Popen[bytes]:
        """Return a process that ends when the worker has opened another shard.

        The loop runs in the worker's container, because each `docker exec` takes as long as the
        count of many shards.
        """
        number = f"$(ls {CACHE}/*/shard.parquet 2>/dev/null | wc -l)"
        loop = f"n={number}; until [ {number} -gt $n ]; do sleep 0.02; done"
        words = ["docker", "exec", worker, "timeout", str(PATIENCE), "sh", "-c", loop]
        return subprocess.Popen(words)

    def in_update(self) -> list[str]:
        """Return the workers whose host process computes an update."""
        find = "cat /proc/[0-9]*/cmdline 2>/dev/null | grep -c HostProcess.call || true"
        return [w for w in self.workers() if docker("exec", w, "sh", "-c", find) != "0"]

    def start(self, spec: StepSpec, place: str, hosts: int = 0) -> str:
        name = f"confide-test-{uuid.uuid4().hex[:12]}"
        environment = dict(self.step["environment"]) | {"CONFIDE_CLUSTER": place}
        environment = environment_for(
            spec, environment | {"CONFIDE_HOSTS": str(hosts)}, apart=False
        )
        words = ["run", "--detach", "--name", name, f"--network={PROJECT}_steps", "--cap-drop=ALL"]
        words += ["--security-opt=no-new-privileges", "--label=confide.run=ray", "--shm-size=1g"]
        for variable, value in environment.items():
            words += ["--env", f"{variable}={value}"]
        for volume in self.step["volumes"]:
            words += ["--volume", f"{PROJECT}_{volume['source']}:{volume['target']}"]
        body = base64.b64encode(spec.model_dump_json().encode()).decode()
        uri = f"data:application/json;base64,{body}"
        docker(*words, f"confide-task:{TAG}", "-m", "tasks", spec.step, "--spec", uri)
        return name

    def ended(self, name: str) -> int:
        running = "{{.State.Running}}"
        waited(f"{name} ends", lambda: docker("inspect", "-f", running, name) == "false")
        log = subprocess.run(["docker", "logs", name], capture_output=True, text=True, check=True)
        print(log.stdout[-2000:], log.stderr[-4000:])
        return int(docker("inspect", "-f", "{{.State.ExitCode}}", name))

    def run(self, spec: StepSpec, place: str = "in-process", hosts: int = 0) -> None:
        name = self.start(spec, place, hosts)
        assert self.ended(name) == 0
        docker("rm", "--force", name)

    def checksums(self, spec: StepSpec) -> dict[str, Any]:
        (content,) = self.read(f"{spec.output.replace('store://', 'store/')}/checksums.json")
        return dict(content)

    def charged(self, spec: StepSpec) -> list[list[str]]:
        query = f"select state from entries where spec_hash = '{spec.digest()}'"  # noqa: S608
        return self.ledger(query)

    def forget(self, spec: StepSpec) -> None:
        folder = spec.output.replace("store://", "store/")
        self.storage(
            f"for name in names({folder + '/'!r}):\n"
            "    call('/storage/v1/b/confide/o/' + quote(name, ''), 'DELETE')"
        )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    cluster.up()
    for step in ("budget", "private_corpus"):
        cluster.run(SPECS[step])
    yield cluster
    left = docker("ps", "--all", "--quiet", "--filter=label=confide.run=ray").split()
    if left:
        docker("rm", "--force", *left)
    cluster.down()


@pytest.fixture(scope="module")
def killed(cluster: Cluster) -> dict[str, int]:
    """Release the vocabulary; return the number of counted shards at each kill."""
    spec, storage = SPECS["vocabulary"], cluster.compose("ps", "--quiet", "storage").strip()
    counted = {}

    def pause_during_count() -> int:
        """Pause the store when a worker has opened another shard; return the number of all."""
        waiting = [cluster.until_another_shard(worker) for worker in cluster.workers()]
        waited("a shard is opened", lambda: any(w.poll() == 0 for w in waiting))
        docker("pause", storage)
        for process in waiting:
            process.kill()
            process.wait()
        return opened(cluster)

    first = cluster.start(spec, ADDRESS)
    counted["driver"] = pause_during_count()
    docker("kill", "--signal=KILL", first)
    docker("unpause", storage)
    docker("rm", "--force", first)

    second = cluster.start(spec, ADDRESS)
    counted["worker"] = pause_during_count()
    victim = max(cluster.counted().items(), key=lambda item: len(item[1]))[0]
    docker("kill", "--signal=KILL", victim)
    docker("unpause", storage)
    assert cluster.ended(second) == 0
    counted["workers left"] = len(cluster.workers())
    return counted


def opened(cluster: Cluster) -> int:
    return len(set().union(*cluster.counted().values()))


def test_step_and_worker_were_killed_during_the_count(killed: dict[str, int]) -> None:
    # The second step may be paused while it counts the shards again that the first had opened.
    assert 0 < killed["driver"] <= killed["worker"] < SHARDS
    assert killed["workers left"] == 1


def test_vocabulary_is_charged_once(cluster, killed):
    assert cluster.charged(SPECS["vocabulary"]) == [["settled"]]


def test_vocabulary_has_the_bytes_of_a_run_in_process(cluster, killed):
    spec = SPECS["vocabulary"]
    on_ray = cluster.checksums(spec)
    assert "words.json" in on_ray
    cluster.forget(spec)
    cluster.run(spec)
    assert cluster.checksums(spec) == on_ray
    assert cluster.charged(spec) == [["settled"]]


def test_worker_killed_during_an_update_is_replaced_and_the_training_ends(cluster, killed):
    """The other steps to the private model follow, with its training on two hosts."""
    cluster.up()  # including the killed worker
    for name in TO_THE_MODEL:
        cluster.run(SPECS[name], ADDRESS)
    spec = SPECS["With DP / pretraining"]
    step = cluster.start(spec, ADDRESS, hosts=2)
    victim = waited("an update is computed", cluster.in_update)[0]
    docker("kill", "--signal=KILL", victim)
    assert cluster.ended(step) == 0
    assert len(cluster.workers()) == 1
    assert cluster.charged(spec) == [["settled"]]
    cluster.run(SPECS["With DP / exposure"], ADDRESS)


def test_files_of_ray_contain_no_private_text(cluster, killed):
    output = SPECS["vocabulary"].output.replace("store://", "store/")
    (words,) = cluster.read(f"{output}/words.json")
    long = [word for word in words if len(word) > 8 and word.isalpha()][:40]
    assert long
    find = "grep -rlF -e " + " -e ".join(long) + " /tmp/ray/session_*/logs || true"
    for container in (*cluster.workers(), cluster.compose("ps", "--quiet", "ray-head").strip()):
        assert docker("exec", container, "sh", "-c", "ls /tmp/ray/session_*/logs")
        assert docker("exec", container, "sh", "-c", find) == ""


def test_workers_have_no_seed_and_no_key(cluster):
    (worker, *_) = cluster.workers()
    folders = "/var/lib/confide-seeds /var/lib/confide/keys"
    assert docker("exec", worker, "sh", "-c", f"ls -A {folders} | grep json || true") == ""
    assert docker("exec", worker, "id", "-u") == "10001"
