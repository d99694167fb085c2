"""The Spark engine on real executors: faults, order, and who learns what.

`make test-spark` sets Spark up and runs this; without it, these tests skip.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from child_processes import alive, wait_for
from engine_conformance import EngineConformance, corpora, expected
from spark_functions import Echo, Gate, broken, environment, processes, refused, squared

from dp_core.data.engines import DataEngine
from dp_core.data.spark import Spark
from dp_core.errors import BadInput, ConfideError

__all__ = ["corpora", "expected"]

ROOT = Path(__file__).parents[3]
HOME = Path(
    os.environ.get("SPARK_HOME") or ROOT / ".venv/spark/lib/python3.11/site-packages/pyspark"
)
MASTER = "local-cluster[2,1,1024]"
PLANTED = "Zebulon Quist"
pytestmark = [
    pytest.mark.slow,
    # Spark's client leaves sockets to the garbage collector.
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
    pytest.mark.skipif(not HOME.exists(), reason="no .venv/spark: run `make test-spark`"),
]


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spark") / "events"


@pytest.fixture(scope="module")
def spark(events: Path) -> Iterator[Spark]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{Path(__file__).parent}")
        patch.setenv("CONFIDE_LEDGER", "postgresql://ledger:planted-password@host/ledger")
        engine = Spark(
            MASTER,
            home=HOME,
            events=events,
            environment=WITHHELD,
            packages=PACKAGES,
            settings={"spark.eventLog.compress": "false"},  # to be searched as it is
        )
        yield engine
        engine.close()


PACKAGES = ("dp_core", "tasks")
WITHHELD = {"CONFIDE_LEDGER": "withheld"}


class TestConformance(EngineConformance):
    """The same bytes and errors as every other engine."""

    @pytest.fixture
    def engine(self, spark: Spark) -> DataEngine:
        return spark


def test_values_come_in_order_from_processes_of_others(spark: Spark, tmp_path: Path) -> None:
    assert list(spark.map(squared, range(30))) == [n * n for n in range(30)]
    found = list(spark.map(processes, [tmp_path] * 8))
    assert os.getpid() not in {process for process, _ in found}
    assert len({executor for _, executor in found}) == 2


def test_an_executor_killed_in_mid_map_changes_nothing(spark: Spark, tmp_path: Path) -> None:
    found: list[int] = []
    job = threading.Thread(target=lambda: found.extend(spark.map(Gate(tmp_path), range(6))))
    job.start()
    # Both executors stand in the middle of a shard: one is killed.
    wait_for(lambda: len({executor for _, _, executor in tries(tmp_path)}) == 2, 120)
    shard, _, victim = tries(tmp_path)[0]
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: not alive(victim), 120)
    again = wait_for(lambda: [m for m in tries(tmp_path) if m[0] == shard and m[2] != victim], 120)
    (tmp_path / "open").touch()
    job.join(120)
    assert found == [2 * n for n in range(6)]
    assert again


def tries(folder: Path) -> list[tuple[int, int, int]]:
    """Return shard, process and executor of every call so far, in order of shards."""
    names = [file.name for file in folder.iterdir() if file.name != "open"]
    return sorted(tuple(map(int, name.split("."))) for name in names)  # type: ignore[misc]


def test_our_errors_come_as_they_were_raised(spark: Spark) -> None:
    found = spark.map(refused, [0, 2, 3, 5])
    assert [next(found), next(found)] == [0, 2]
    with pytest.raises(BadInput) as caught:
        next(found)
    told = caught.value
    assert (told.what, told.where, told.fix) == ("an odd shard", "shard 3", "Use even ones.")
    assert list(spark.map(squared, [3])) == [9], "and the session goes on"


def test_neither_error_nor_logs_nor_events_quote_what_was_read(spark: Spark, events: Path) -> None:
    with pytest.raises(ConfideError) as caught:
        list(spark.map(broken, [PLANTED]))
    assert "ValueError at tests/dp_core/data/spark_functions.py:" in str(caught.value)
    assert PLANTED not in str(caught.value)
    assert list(spark.map(Echo(PLANTED), [PLANTED])) == [PLANTED + PLANTED]
    assert spark._scratch is not None
    logs = spark._scratch.rglob("work/**/std*")
    written = [file for file in (*events.rglob("*"), *logs) if file.is_file()]
    texts = {file: file.read_bytes() for file in written}
    assert any(b"SparkListenerTaskEnd" in text for text in texts.values()), "there are events"
    assert any(b"WorkerFault" in text for text in texts.values()), "and the executors' logs"
    secret = spark._secret.encode()
    for file, text in texts.items():
        assert b"Zebulon" not in text, file
        assert secret not in text, file
    on_disk = [f for f in spark._scratch.rglob("*") if f.is_file() and not f.is_symlink()]
    assert not [file for file in on_disk if b"Zebulon" in file.read_bytes()]


def test_the_cluster_s_secret_is_on_no_command_line(spark: Spark) -> None:
    assert list(spark.map(squared, [2])) == [4]
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines.append((process / "cmdline").read_bytes())
        except OSError:  # it has ended meanwhile
            continue
    assert any(b"org.apache.spark" in line for line in lines)
    assert not [line for line in lines if spark._secret.encode() in line]


def test_workers_are_not_told_what_is_withheld(spark: Spark) -> None:
    (told,) = spark.map(environment, [""])
    assert told["CONFIDE_LEDGER"] == "withheld"
    assert "planted-password" not in "".join(told.values())


def test_a_worker_with_other_code_refuses(spark: Spark, tmp_path: Path) -> None:
    spark.close()  # one session a process
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "dp_core", tmp_path / "dp_core", ignore=ignored)
    errors = tmp_path / "dp_core" / "labels.py"
    errors.write_text(errors.read_text() + "# another version\n")
    path = f"{tmp_path}:{ROOT}:{Path(__file__).parent}"
    settings = {"spark.executorEnv.PYTHONPATH": path}
    other = Spark(MASTER, home=HOME, packages=PACKAGES, settings=settings)
    try:
        with pytest.raises(BadInput, match="not those of this step"):
            list(other.map(squared, range(3)))
    finally:
        other.close()


def test_a_closed_session_leaves_nothing_behind(spark: Spark, tmp_path: Path) -> None:
    found = list(spark.map(processes, [tmp_path] * 6))  # starts anew
    java, scratch = spark._gateway.proc.pid, spark._scratch
    assert scratch is not None
    spark.close()
    assert not alive(java)
    assert not scratch.exists()
    for process in {process for both in found for process in both}:
        wait_for(lambda process=process: not alive(process), 30)
    assert not (HOME / "work").exists()
