"""A vocabulary released on the compose stack's Spark cluster, while its parts are killed.

`docker/ci` brings the stack up, as for `test_stack.py`; the cluster, this file does. No wait is a
guess: the object store is stopped in its tracks while shards are being counted, so that whatever is
killed then was in the middle of one.
"""

from __future__ import annotations

import base64
import json
import subprocess
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from child_processes import wait_for
from running_stack import PROJECT, TAG, TINY, Services, on_the_stack

from tasks.protocol import JobSettings, StepSpec, dp_bert_steps

pytestmark = on_the_stack("Spark is NOT tried")
MASTER = "spark://spark-master:7077"
CACHE = "/var/lib/confide/cache/shards"
SHARDS = 48
PATIENCE = 600.0  # seconds, on a machine that does much else
SPECS = dp_bert_steps(
    JobSettings(
        **TINY
        | {
            "synthetic_patients": 1500,
            "declared_units": 1500,
            "vocabulary_source": "private",
            "corpus_shards": SHARDS,
            "data_version": f"spark-{uuid.uuid4().hex[:8]}",
        }
    ),
)


def docker(*words: str) -> str:
    answer = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def waited(what: str, condition: Callable[[], Any]) -> Any:
    return wait_for(condition, PATIENCE, what=what, pause=0.1)


class Cluster(Services):
    """The Spark cluster beside the stack's database and object store."""

    def __init__(self) -> None:
        described = json.loads(self.compose("--profile", "spark", "config", "--format", "json"))
        services = described["services"]
        self.step = services["prepare"]  # which has what a step has that charges
        self.secret = services["spark-master"]["environment"]["CONFIDE_SPARK_SECRET"]

    def up(self) -> None:
        names = ("storage", "postgres", "spark-master", "spark-worker")
        self.compose("--profile", "spark", "up", "--detach", "--wait", *names)

    def down(self) -> None:
        self.compose(
            "--profile", "spark", "rm", "--stop", "--force", "spark-master", "spark-worker"
        )

    def workers(self) -> list[str]:
        return self.compose("--profile", "spark", "ps", "--quiet", "spark-worker").split()

    def counted(self) -> dict[str, set[str]]:
        """Return the shards that each worker that runs has opened so far."""
        find = f"ls {CACHE} 2>/dev/null | grep shard$ || true"
        return {w: set(docker("exec", w, "sh", "-c", find).split()) for w in self.workers()}

    def applications(self) -> int:
        program = (
            "import json, urllib.request as u\n"
            "told = json.load(u.urlopen('http://127.0.0.1:8080/json/'))\n"
            "print(len(told['activeapps']))"
        )
        words = ("exec", "-T", "spark-master", "python", "-S", "-c", program)
        return int(self.compose("--profile", "spark", *words))

    def start(self, spec: StepSpec, engine: str) -> str:
        """Start a step in a container of its own, as the launcher does; return its name."""
        name = f"confide-test-{uuid.uuid4().hex[:12]}"
        spark = engine.startswith("spark:")
        told = dict(self.step["environment"]) | {"CONFIDE_DATA_ENGINE": engine}
        if spark:
            told["CONFIDE_SPARK_SECRET"] = self.secret
        words = ["run", "--detach", "--name", name, f"--network={PROJECT}_steps", "--cap-drop=ALL"]
        words += ["--security-opt=no-new-privileges", "--label=confide.run=spark"]
        for variable, value in told.items():
            words += ["--env", f"{variable}={value}"]
        for volume in self.step["volumes"]:
            words += ["--volume", f"{PROJECT}_{volume['source']}:{volume['target']}"]
        body = base64.b64encode(spec.model_dump_json().encode()).decode()
        image = f"confide-task{'-spark' if spark else ''}:{TAG}"
        uri = f"data:application/json;base64,{body}"
        docker(*words, image, "-m", "tasks", spec.step, "--spec", uri)
        return name

    def ended(self, name: str) -> int:
        """Return the exit code of a step's container, once it has ended; show what it said."""
        running = "{{.State.Running}}"
        waited(f"{name} ends", lambda: docker("inspect", "-f", running, name) == "false")
        said = subprocess.run(["docker", "logs", name], capture_output=True, text=True, check=True)
        print(said.stdout[-2000:], said.stderr[-4000:])
        return int(docker("inspect", "-f", "{{.State.ExitCode}}", name))

    def run(self, spec: StepSpec, engine: str = "in-process") -> None:
        name = self.start(spec, engine)
        assert self.ended(name) == 0
        docker("rm", "--force", name)

    def checksums(self, spec: StepSpec) -> dict[str, Any]:
        (found,) = self.read(f"{spec.output.removeprefix('store://')}/checksums.json")
        return dict(found)

    def charged(self, spec: StepSpec) -> list[list[str]]:
        query = f"select state from entries where spec_hash = '{spec.digest()}'"  # noqa: S608
        return self.ledger(query)

    def forget(self, spec: StepSpec) -> None:
        """Take a step's output away: it will do its work again."""
        folder = spec.output.removeprefix("store://")
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
    left = docker("ps", "--all", "--quiet", "--filter=label=confide.run=spark").split()
    if left:
        docker("rm", "--force", *left)
    cluster.down()


@pytest.fixture(scope="module")
def killed(cluster: Cluster) -> dict[str, int]:
    """Release the vocabulary; return how many shards were counted at each kill."""
    spec, storage = SPECS["vocabulary"], cluster.compose("ps", "--quiet", "storage").strip()
    counted = {}

    def in_mid_count(before: int) -> int:
        """Stop the store once more shards than before are counted; return how many."""
        number = waited("shards are counted", lambda: (n := opened(cluster)) > before and n)
        docker("pause", storage)
        return int(number)

    first = cluster.start(spec, MASTER)
    counted["driver"] = in_mid_count(0)
    docker("kill", "--signal=KILL", first)
    docker("unpause", storage)
    docker("rm", "--force", first)
    waited("the dead driver's executors end", lambda: cluster.applications() == 0)

    second = cluster.start(spec, MASTER)
    counted["worker"] = in_mid_count(counted["driver"])
    victim = max(cluster.counted().items(), key=lambda one: len(one[1]))[0]
    docker("kill", "--signal=KILL", victim)
    docker("unpause", storage)
    assert cluster.ended(second) == 0
    counted["workers left"] = len(cluster.workers())
    return counted


def opened(cluster: Cluster) -> int:
    return len(set().union(*cluster.counted().values()))


def test_the_kills_were_in_mid_count(killed: dict[str, int]) -> None:
    assert 0 < killed["driver"] < killed["worker"] < SHARDS
    assert killed["workers left"] == 1


def test_it_is_paid_for_once(cluster: Cluster, killed: dict[str, int]) -> None:
    assert cluster.charged(SPECS["vocabulary"]) == [["settled"]]


def test_it_is_the_same_as_in_process_to_the_byte(cluster: Cluster, killed: dict[str, int]) -> None:
    spec = SPECS["vocabulary"]
    on_spark = cluster.checksums(spec)
    assert "words.json" in on_spark
    cluster.forget(spec)
    cluster.run(spec)
    assert cluster.checksums(spec) == on_spark
    assert cluster.charged(spec) == [["settled"]]


def test_the_event_logs_hold_no_text(cluster: Cluster, killed: dict[str, int]) -> None:
    """Of the words that were counted none is in them, nor who said them, nor the secret."""
    program = """
import json, os, sys
import pyarrow as pa
text = ''
for folder, _, files in os.walk('/var/lib/confide/spark-events'):
    for name in files:
        kind = 'zstd' if '.zstd' in name else None
        try:
            found = pa.input_stream(os.path.join(folder, name), compression=kind).read().decode()
        except OSError:  # a killed driver's may end in the middle
            continue
        for line in found.splitlines() if name.startswith('events') else [found]:
            event = json.loads(line) if line.startswith('{') else line
            if isinstance(event, dict):
                event.pop('Classpath Entries', None)  # names of Spark's own archives
            text += json.dumps(event)
print('SparkListenerTaskEnd' in text, [word for word in sys.argv[1:] if word in text])
"""
    output = SPECS["vocabulary"].output.removeprefix("store://")
    (words,) = cluster.read(f"{output}/words.json")
    long = [word for word in words if len(word) > 8 and word.isalpha()][:40]
    assert long
    volumes = [f"--volume={PROJECT}_home:/var/lib/confide:ro"]
    image = f"confide-task-spark:{TAG}"
    asked = ["run", "--rm", "--network=none", *volumes, "--entrypoint=python", image, "-c", program]
    assert docker(*asked, *long, cluster.secret) == "True []"


def test_workers_hold_no_secret_but_the_cluster_s(cluster: Cluster) -> None:
    settings = json.loads(cluster.compose("--profile", "spark", "config", "--format", "json"))
    for name in ("spark-master", "spark-worker"):
        service = settings["services"][name]
        told = service["environment"]
        assert [key for key in told if "PASSWORD" in key or "LEDGER" in key] == []
        assert not service.get("volumes")
        assert list(service["networks"]) == ["steps"]
        assert not service.get("ports")
    (one, *_) = cluster.workers()
    listed = docker("exec", one, "sh", "-c", "ls -A /var/lib/confide-seeds /var/lib/confide/keys")
    assert not [line for line in listed.splitlines() if line.endswith(".json")]
    assert docker("exec", one, "id", "-u") == "10001"
