"""The commands for backup and restore in docs/operate.md, executed on the running stack.

As for `test_stack.py`, `docker/ci` starts the stack; the restored stack is a separate project.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from child_processes import completed
from running_stack import LONGEST, PROJECT, ROOT, TAG, TINY, Stack, on_the_stack

pytestmark = on_the_stack("no backup is made")
RESTORED = f"{PROJECT}-restored"


def commands(number: int, project: str) -> str:
    """Return a block of the section on backup and restore, for a project of this name."""
    text = (ROOT / "docs" / "operate.md").read_text()
    section = text.partition("### Backup and restore\n")[2].partition("\n### ")[0]
    block = re.findall(r"^```sh\n(.+?)^```", section, re.M | re.S)[number]
    return (
        str(block)
        .replace("confide_", f"{project}_")
        .replace("confide-task:local", f"confide-task:{TAG}")
    )


def shell(words: str, folder: Path, project: str) -> str:
    environment = os.environ | {
        "COMPOSE_PROJECT_NAME": project,
        "COMPOSE_FILE": str(ROOT / "docker-compose.yml"),
        "COMPOSE_ENV_FILES": str(ROOT / ".env"),
    }
    answer = completed("bash", "-euo", "pipefail", "-c", words, cwd=folder, env=environment)
    assert answer.returncode == 0, answer.stderr[-2000:]
    return answer.stdout


def rows(query: str, database: str, folder: Path, project: str) -> str:
    psql = f"docker compose exec -T postgres psql -U postgres -d {database} -Atc '{query}'"
    return shell(psql, folder, project)


def seeds(folder: Path, project: str) -> str:
    """Return names, modes, owners and checksums of the files in the volume of the seeds."""
    look = (
        "cd /from; find . -printf '%p %m %U\\n' | sort; find . -type f | sort | xargs -r sha256sum"
    )
    run = f"docker run --rm --user 0 -v {project}_seeds:/from:ro --entrypoint bash"
    return shell(f'{run} confide-task:{TAG} -c "{look}"', folder, project)


@pytest.fixture(scope="module")
def restored(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Back up the stack and restore it as a second project; return the folder of the backup."""
    if not stack.ledger("select * from entries limit 1"):  # no job ran: nothing to back up
        assert stack.wait("dp_bert", stack.trigger("dp_bert", TINY), LONGEST) == "success"
    folder = tmp_path_factory.mktemp("backup")
    shell(commands(0, PROJECT), folder, PROJECT)
    restore = commands(1, RESTORED).rstrip()
    assert restore.endswith("\ndocker compose up --detach")
    try:
        # The other services would only repeat what is tested elsewhere.
        shell(restore.removesuffix("\ndocker compose up --detach"), folder, RESTORED)
        yield folder
    finally:
        shell("docker compose down --volumes --timeout 5", folder, RESTORED)


@pytest.mark.cases
def test_restored_databases_are_identical(restored, database, query):
    assert rows(query, database, restored, RESTORED) == rows(query, database, restored, PROJECT)


def test_restored_seeds_are_identical_and_private(restored):
    listing = seeds(restored, RESTORED)
    assert listing == seeds(restored, PROJECT)
    assert ". 700 10001\n" in listing


def test_restored_ledger_can_be_read_by_a_step(restored):
    """The ledger's user, with the password of the stack, owns tables and rows."""
    assert int(rows("select count(*) from entries", "ledger", restored, RESTORED)) >= 2
    ask = "docker compose run --rm --no-deps -T prepare -m tasks.cli ledger --json"
    spent = shell(ask, restored, RESTORED)
    assert "synthetic-notes" in spent
    assert spent == shell(ask, restored, PROJECT)
