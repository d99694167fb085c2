import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.pool import NullPool

from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.seed_store import SeedStore

SERVER_VARIABLE = "CONFIDE_TEST_POSTGRES"


def server_programs() -> Path | None:
    """Return the folder of initdb and pg_ctl, which Debian does not put on the PATH."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"), reverse=True)
    programs = [str(p) for p in versions] + [p for p in [shutil.which("pg_ctl")] if p]
    return Path(programs[0]).parent if programs else None


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[URL]:
    """The PostgreSQL server named in the environment, or a temporary one for these tests."""
    if named := os.environ.get(SERVER_VARIABLE):
        yield make_url(named)
        return
    programs = server_programs()
    if programs is None:
        pytest.skip(f"no PostgreSQL: set {SERVER_VARIABLE} to a server's URL, or install one")
    owner = "postgres" if os.geteuid() == 0 else None  # PostgreSQL refuses to run as root
    home = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
    if owner:
        shutil.chown(home, owner)

    def run(program: str, *arguments: str) -> None:
        subprocess.run(
            [programs / program, "-D", home / "data", *arguments],
            check=True,
            user=owner,
            cwd=home,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    run("initdb", "-U", "postgres", "--auth=trust")
    options = f"-k {home} -c listen_addresses= -c fsync=off -c max_connections=100"
    run("pg_ctl", "-w", "-l", str(home / "log"), "-o", options, "start")
    try:
        yield URL.create(
            "postgresql+psycopg2", "postgres", database="postgres", query={"host": str(home)}
        )
    finally:
        run("pg_ctl", "-m", "immediate", "stop")
        shutil.rmtree(home)


@pytest.fixture
def postgres_url(postgres_server: URL) -> Iterator[str]:
    name = f"ledger_{uuid.uuid4().hex}"
    server = create_engine(postgres_server, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with server.connect() as db:
        db.execute(text(f"CREATE DATABASE {name}"))
    yield postgres_server.set(database=name).render_as_string(hide_password=False)
    with server.connect() as db:
        db.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'home' / 'ledger.db'}"
    postgres: str = request.getfixturevalue("postgres_url")
    return postgres


@pytest.fixture
def ledger(url: str) -> Ledger:
    opened = Ledger.open(url)
    opened.register_dataset("notes", PrivacyUnit.PATIENT, 8.0, 1e-5)
    return opened


@pytest.fixture
def seeds(tmp_path: Path) -> SeedStore:
    return SeedStore(tmp_path / "seeds")
