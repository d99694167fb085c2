"""The inputs and results of steps, as versioned, frozen models.

The package imports only pydantic, `dp_core.config` and the standard library, so that Airflow parses
a DAG file in milliseconds.
"""

import sys
from pathlib import Path

# The folder with the code: the checkout, or the folder `confide` of an installed package.
CHECKOUT = Path(__file__).resolve().parents[2]
INSTALLED = __name__.startswith("confide.")
HOME = Path("~/.confide") if INSTALLED else CHECKOUT / ".confide"
TASK_PYTHON = Path(sys.executable) if INSTALLED else CHECKOUT / ".venv" / "task" / "bin" / "python"
SETUP = 'pip install "confide[cpu]" (or [gpu], [tpu])' if INSTALLED else "make setup"
