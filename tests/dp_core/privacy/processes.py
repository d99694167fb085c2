import signal
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from typing import Any, Protocol

PATIENCE = 300.0  # seconds, enough for a busy machine


class Gate(Protocol):
    def wait(self) -> int:
        """Wait until all other processes wait too."""


def _answer(work: Callable[..., Any], arguments: tuple[Any, ...], gate: Gate, answers: Any) -> None:
    try:
        answers.put(work(*arguments, gate))
    except Exception as error:
        answers.put(f"failed: {error!r}")
        raise


def run_at_once(
    context: ForkServerContext, work: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]
) -> list[Any]:
    """Call `work` once per tuple of arguments, all with one gate, and return the results."""
    gate, answers = context.Barrier(len(arguments)), context.Queue()
    processes = [
        context.Process(target=_answer, args=(work, given, gate, answers)) for given in arguments
    ]
    for process in processes:
        process.start()
    returned = [answers.get(timeout=PATIENCE) for _ in processes]
    for process in processes:
        process.join(PATIENCE)
    assert [p.exitcode for p in processes] == [0] * len(processes), returned
    return returned


def run_until_killed(context: ForkServerContext, work: Callable[..., Any], *arguments: Any) -> None:
    """Call `work` in a process that must kill itself by SIGKILL."""
    process = context.Process(target=work, args=arguments)
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL
