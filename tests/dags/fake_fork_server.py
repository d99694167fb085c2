"""A fork server that runs `fake_step.py` as every step; its argument is its socket."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path.cwd()))
from tasks.protocol import fork_server

STEP = Path(__file__).with_name("fake_step.py")


def command_line(words: list[str]) -> int:
    """Run `fake_step.py` with the step's arguments."""
    sys.argv = [str(STEP), "-m", "tasks", *words]
    runpy.run_path(str(STEP), run_name="__main__")
    return 0


sys.modules["tasks.execution.contract"] = SimpleNamespace(command_line=command_line)
fork_server.modules_of_steps = list
fork_server.main(sys.argv[1:])
