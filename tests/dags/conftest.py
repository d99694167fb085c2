"""An Airflow of its own for these tests: a home that is thrown away, and steps that only pretend.

The variables are set before anything imports Airflow, which reads them once.
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
    """Airflow's own imports warn of what Airflow's own dependencies will drop."""
    for kind in ("DeprecationWarning", "PendingDeprecationWarning", "UserWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{kind}")


def pytest_sessionstart() -> None:
    """Write the interpreter that stands in for the task environment's."""
    script = HOME / "fake-python"
    fake = Path(__file__).with_name("fake_step.py")
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{fake}" "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)


def pytest_sessionfinish() -> None:
    """Remove the home."""
    import shutil

    shutil.rmtree(HOME, ignore_errors=True)


@pytest.fixture(scope="session")
def database() -> None:
    """Airflow's tables."""
    from airflow.utils.db import initdb

    initdb()


@pytest.fixture(scope="session")
def dags():
    """The DAGs of the folder, by name; a file that cannot be read fails here."""
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(CHECKOUT / "dags")
    assert not bag.import_errors
    return bag.dags
