"""A separate Airflow for these tests, with a temporary home and fake steps.

The variables are set before any import of Airflow, which reads them once.
"""

import os
import stat
import sys
import tempfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
HOME = Path(tempfile.mkdtemp(prefix="confide-dags-"))

os.environ.update(
    {
        "AIRFLOW_HOME": str(HOME / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(CHECKOUT / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__UNIT_TEST_MODE": "False",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{HOME}/airflow.db",
        "CONFIDE_HOME": str(HOME),
        "CONFIDE_TASK_PYTHON": str(HOME / "fake-python"),
    }
)
for name in [n for n in os.environ if n.startswith("CONFIDE_")]:
    if name not in {"CONFIDE_HOME", "CONFIDE_TASK_PYTHON", "CONFIDE_TASK_IMAGE"}:
        os.environ.pop(name, None)
sys.path.insert(0, str(CHECKOUT))


def pytest_configure(config: pytest.Config) -> None:
    """Ignore warnings of Airflow's imports about deprecations in Airflow's dependencies."""
    for kind in ("DeprecationWarning", "PendingDeprecationWarning", "UserWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{kind}")


def pytest_sessionstart() -> None:
    """Write the interpreter that replaces the Python of the task environment."""
    script = HOME / "fake-python"
    fake = Path(__file__).with_name("fake_step.py")
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{fake}" "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)


def pytest_sessionfinish() -> None:
    import shutil

    shutil.rmtree(HOME, ignore_errors=True)


@pytest.fixture(scope="session")
def database() -> None:
    from airflow.utils.db import initdb

    initdb()


@pytest.fixture(scope="session")
def dags():
    """The DAGs of the folder, by name; the fixture fails if a file cannot be imported."""
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(CHECKOUT / "dags")
    assert not bag.import_errors
    return bag.dags
