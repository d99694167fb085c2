"""The fork server: each step is a process of its own, told by its request alone, and ended in time.

The server here imports no TensorFlow, and its steps are a few scripted words; that a real training
gives the same bits is told by tests/e2e/test_forked_training.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from child_processes import alive, wait_for

from tasks.protocol import fork_server_client as fork_server
from tasks.protocol import supervisor
from tasks.protocol.fork_server_client import ForkedStep, Running, StepEnded
from tasks.protocol.supervisor import Process

CHECKOUT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="as the kernel's help is")

# The real server, over steps that do what their words say; `changing` is a module that it imports.
PROGRAM = """
import json, os, sys, time, types
sys.path.insert(0, sys.argv.pop(1))
from tasks.execution import fork_server

def command_line(words):
    import changing
    match words[0]:
        case "tell":
            print(json.dumps({"pid": os.getpid(), "session": os.getsid(0), "state": changing.STATE,
                              "environment": dict(os.environ), "argv": sys.argv,
                              "open": [os.readlink(f"/proc/self/fd/{n}") for n in range(3)],
                              "sockets": sum(os.path.exists(f"/proc/self/fd/{n}") and "socket:" in
                                  os.readlink(f"/proc/self/fd/{n}") for n in range(3, 64))}))
        case "poison":
            changing.STATE.append("poisoned")
            os.environ["LEFT"] = "behind"
            raise MemoryError
        case "exit":
            return int(words[1])
        case "sleep":
            print("asleep", flush=True)
            time.sleep(60)
        case "stubborn":
            os.system("(trap '' TERM; exec sleep 60) & echo $!")
            time.sleep(60)
    return 0

sys.modules["tasks.execution.contract"] = types.SimpleNamespace(command_line=command_line)
fork_server.modules_of_steps = lambda: ["changing"]
sys.exit(fork_server.main(sys.argv[1:]))
"""


class Served:
    """A fork server, and the files that its steps write to."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.socket = folder, folder / ("long" * 30) / "server.socket"
        self.socket.parent.mkdir()
        self.module = folder / "changing.py"
        self.module.write_text("STATE = []\n")
        self.environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "SHARED": "1"}
        given = fork_server.shared_environment(self.environment | {"CONFIDE_LEDGER": "secret"})
        with (folder / "server.log").open("wb") as log:
            self.process = supervisor.start(
                [sys.executable, "-c", PROGRAM, str(folder), str(self.socket)],
                given,
                CHECKOUT,
                log,
            )
        wait_for(self.socket.exists)

    def start(self, *words: str, name: str = "out", **variables: str) -> Running:
        with (self.folder / name).open("wb") as output:
            return fork_server.start(
                words,
                self.environment | variables,
                self.folder,
                output.fileno(),
                python=sys.executable,
                server=self.socket,
            )

    def said(self, name: str = "out") -> str:
        return (self.folder / name).read_text()

    def end(self) -> None:
        supervisor.stop([Process.of(self.process.pid)], 5.0)
        self.process.wait()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("shared"))
    yield server
    server.end()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A server for a test that ends or changes it."""
    server = Served(tmp_path)
    yield server
    server.end()


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were started anew, none of which does anything."""
    started: list[list[str]] = []

    def start(command: list[str], *_: object) -> subprocess.Popen[bytes]:
        started.append(command)
        return subprocess.Popen(["true"])

    monkeypatch.setattr(supervisor, "start", start)
    return started


def test_a_step_is_a_process_that_holds_its_own_environment_alone(shared: Served) -> None:
    assert shared.start("tell", CONFIDE_LEDGER="one's password", CONFIDE_RUN="1").wait() == 0
    assert shared.start("tell", name="second", CONFIDE_RUN="2").wait() == 0
    first, second = json.loads(shared.said()), json.loads(shared.said("second"))
    assert first["environment"]["CONFIDE_LEDGER"] == "one's password"
    assert "CONFIDE_LEDGER" not in second["environment"]
    assert [told["environment"]["CONFIDE_RUN"] for told in (first, second)] == ["1", "2"]
    assert first["environment"]["TF_CPP_MIN_LOG_LEVEL"] == "2"  # set by what was imported
    assert first["pid"] == first["session"] != second["pid"]
    assert first["argv"] == ["tasks", "tell"]
    assert first["open"][1:] == [str(shared.folder / "out")] * 2
    assert first["sockets"] == 0
    held = Path(f"/proc/{shared.process.pid}/environ").read_bytes()
    assert b"password" not in held and b"secret" not in held


def test_a_fault_of_one_step_does_not_spoil_the_next(shared: Served) -> None:
    poisoned = shared.start("poison", name="poisoned")
    assert poisoned.wait() == 1
    assert "MemoryError" in shared.said("poisoned")
    assert shared.start("tell").wait() == 0
    told = json.loads(shared.said())
    assert told["state"] == [] and "LEFT" not in told["environment"]
    assert [shared.start("exit", str(code)).wait() for code in (3, 75, 2)] == [3, 75, 2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda served: served.environment.update(SHARED="2", TF_MORE="1"), "SHARED, TF_MORE"),
        (lambda served: served.module.write_text("STATE = [1, 2]\n"), "has changed"),
        (lambda served: supervisor.stop([Process.of(served.process.pid)], 5.0), ""),
    ],
    ids=["another environment", "changed sources", "no server"],
)
def test_what_would_not_be_the_same_is_started_anew(
    served: Served, cold: list[list[str]], change: Callable[[Served], None], said: str
) -> None:
    assert served.start("exit", "5").wait() == 5
    change(served)
    step = served.start("exit", "3", name="refused")
    assert step.wait() == 0  # what stands in for a process of its own
    assert cold == [[sys.executable, "-m", "tasks", "exit", "3"]]
    assert said in served.said("refused") and "=" not in served.said("refused")  # no value is told


def test_a_server_whose_sources_changed_begins_anew(served: Served, cold: list[list[str]]) -> None:
    assert served.start("tell").wait() == 0
    served.module.write_text("STATE = ['new']\n")
    assert served.start("tell").wait() == 0
    assert len(cold) == 1
    pid = served.process.pid
    assert served.start("tell", name="anew").wait() == 0
    assert json.loads(served.said("anew"))["state"] == ["new"]
    assert alive(pid) and len(cold) == 1


def test_whoever_waits_no_more_ends_the_step_and_what_it_started(
    shared: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = shared.start("stubborn")
    wait_for(lambda: re.fullmatch(r"\d+\n", shared.said()))
    child = int(shared.said())
    assert alive(step.pid) and alive(child)
    with pytest.raises(subprocess.TimeoutExpired):
        step.wait(0.01)
    assert isinstance(step, ForkedStep)
    step._connection.close()  # as the kernel does for a worker that is killed
    assert shared.start("exit", "3", name="meanwhile").wait() == 3
    wait_for(lambda: not alive(step.pid) and not alive(child))


def test_a_cancelled_step_tells_its_signal(shared: Served) -> None:
    step = shared.start("sleep")
    wait_for(lambda: "asleep" in shared.said())
    supervisor.stop([Process.of(step.pid)], 5.0)
    assert step.wait(10.0) == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_step_outlives_its_server(served: Served, number: signal.Signals) -> None:
    step = served.start("sleep")
    wait_for(lambda: "asleep" in served.said())
    os.kill(served.process.pid, number)
    assert step.wait(10.0) < 0
    wait_for(lambda: not alive(step.pid))


def test_nonsense_on_the_socket_starts_nothing_and_harms_nobody(shared: Served) -> None:
    for words in (b"", b"nonsense\n", b'{"kind":"start","words":["tell"],"environment":{}}\n'):
        with socket.socket(socket.AF_UNIX) as client, fork_server.address(shared.socket) as place:
            client.connect(place)
            client.sendall(words)  # without a descriptor to write to
            client.shutdown(socket.SHUT_WR)
            answer = fork_server.read_answer(client)
            assert isinstance(answer, StepEnded) and answer.exit_code != 0
    assert shared.socket.stat().st_mode & 0o077 == 0
    began = time.monotonic()
    assert shared.start("exit", "4").wait() == 4
    assert time.monotonic() - began < 5
