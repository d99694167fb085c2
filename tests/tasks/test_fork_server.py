import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from child_processes import alive, wait_for

from tasks.protocol import fork_server, supervisor
from tasks.protocol.fork_server import ForkedStep
from tasks.protocol.supervisor import Process

Running = ForkedStep | subprocess.Popen[bytes]
CHECKOUT = Path(__file__).resolve().parents[2]

# The real server with scripted steps; `changing` is a module that the server imports.
PROGRAM = """
import json, os, sys, time, types
sys.path.insert(0, sys.argv.pop(1))
from tasks.protocol import fork_server

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
fork_server.main(sys.argv[1:])
"""


def exit_code(step: Running) -> int:
    wait_for(lambda: step.poll() is not None)
    code = step.poll()
    return code


class Served:
    def __init__(self, folder: Path) -> None:
        self.folder, self.socket = folder, folder / ("long" * 30) / "server.socket"
        self.socket.parent.mkdir()
        self.module = folder / "changing.py"
        self.module.write_text("STATE = []\n")
        self.environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "SHARED": "1"}
        self.environment.pop("TF_CPP_MIN_LOG_LEVEL", None)  # benchmarks set it when imported
        given = fork_server.shared_environment(self.environment | {"CONFIDE_LEDGER": "secret"})
        with (folder / "server.log").open("wb") as log:
            self.process = supervisor.start(
                [sys.executable, "-c", PROGRAM, str(folder), str(self.socket)], given, CHECKOUT, log
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

    def run(self, *words: str, name: str = "out", **variables: str) -> int:
        return exit_code(self.start(*words, name=name, **variables))

    def output(self, name: str = "out") -> str:
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
    server = Served(tmp_path)
    yield server
    server.end()


@pytest.fixture
def new_processes(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were started as new processes, replaced by a process that does nothing."""
    started: list[list[str]] = []

    def start(command: list[str], *_: object) -> subprocess.Popen[bytes]:
        started.append(command)
        return subprocess.Popen(["true"])

    monkeypatch.setattr(supervisor, "start", start)
    return started


def test_forked_step_has_only_its_own_environment(shared):
    assert shared.run("tell", CONFIDE_LEDGER="one's password", CONFIDE_RUN="1") == 0
    assert shared.run("tell", name="second", CONFIDE_RUN="2") == 0
    first, second = json.loads(shared.output()), json.loads(shared.output("second"))
    assert first["environment"]["CONFIDE_LEDGER"] == "one's password"
    assert "CONFIDE_LEDGER" not in second["environment"]
    assert [step["environment"]["CONFIDE_RUN"] for step in (first, second)] == ["1", "2"]
    assert first["environment"]["TF_CPP_MIN_LOG_LEVEL"] == "2"  # set by an imported module
    assert first["pid"] == first["session"] != second["pid"]
    assert first["argv"] == ["tasks", "tell"]
    assert first["open"][1:] == [str(shared.folder / "out")] * 2
    assert first["sockets"] == 0
    held = Path(f"/proc/{shared.process.pid}/environ").read_bytes()
    assert b"password" not in held and b"secret" not in held


def test_failed_step_does_not_affect_the_next(shared):
    assert shared.run("poison", name="poisoned") == 1
    assert "MemoryError" in shared.output("poisoned")
    assert shared.run("tell") == 0
    state = json.loads(shared.output())
    assert state["state"] == [] and "LEFT" not in state["environment"]
    assert [shared.run("exit", str(code)) for code in (3, 75, 2)] == [3, 75, 2]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda served: served.environment.update(SHARED="2", TF_MORE="1"), "SHARED, TF_MORE"),
        (lambda served: served.module.write_text("STATE = [1, 2]\n"), "has changed"),
        (lambda served: supervisor.stop([Process.of(served.process.pid)], 5.0), ""),
    ],
    ids=["another environment", "changed sources", "no server"],
)
def test_changed_server_state_starts_a_new_process(served, new_processes, change, reason):
    assert served.run("exit", "5") == 5
    change(served)
    assert served.run("exit", "3", name="refused") == 0  # the code of the replacement process
    assert new_processes == [[sys.executable, "-m", "tasks", "exit", "3"]]
    # no value is printed
    assert reason in served.output("refused") and "=" not in served.output("refused")


def test_server_with_changed_sources_restarts_in_place(served, new_processes):
    assert served.run("tell") == 0
    served.module.write_text("STATE = ['new']\n")
    assert served.run("tell") == 0
    assert len(new_processes) == 1
    pid = served.process.pid
    assert served.run("tell", name="anew") == 0
    assert json.loads(served.output("anew"))["state"] == ["new"]
    assert alive(pid) and len(new_processes) == 1


def test_closed_connection_ends_the_step_and_its_children(shared, monkeypatch):
    step = shared.start("stubborn")
    wait_for(lambda: re.fullmatch(r"\d+\n", shared.output()))
    child = int(shared.output())
    assert alive(step.pid) and alive(child)
    assert step.poll() is None
    step._connection.close()  # as the kernel does for a worker that is killed
    assert shared.run("exit", "3", name="meanwhile") == 3
    wait_for(lambda: not alive(step.pid) and not alive(child))


def test_cancelled_step_returns_its_signal(shared):
    step = shared.start("sleep")
    wait_for(lambda: "asleep" in shared.output())
    supervisor.stop([Process.of(step.pid)], 5.0)
    assert exit_code(step) == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_steps_end_with_their_server(served, number):
    step = served.start("sleep")
    wait_for(lambda: "asleep" in served.output())
    os.kill(served.process.pid, number)
    assert exit_code(step) < 0
    wait_for(lambda: not alive(step.pid))


def test_invalid_requests_start_no_step_and_leave_the_server_running(shared):
    for words in (b"", b"nonsense\n", b'{"words":["tell"],"environment":{}}\n'):
        with socket.socket(socket.AF_UNIX) as client, fork_server.address(shared.socket) as place:
            client.connect(place)
            client.sendall(words)  # without a file descriptor for the output
            client.shutdown(socket.SHUT_WR)
            assert fork_server.read_answer(client)["exit_code"] != 0
    assert shared.socket.stat().st_mode & 0o077 == 0
    began = time.monotonic()
    assert shared.run("exit", "4") == 4
    assert time.monotonic() - began < 5
