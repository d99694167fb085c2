"""SIGKILL at any point of the protocol neither loses a charge nor redraws noise."""

from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from ledger_examples import KILL_POINTS, release_in_a_process
from processes import PATIENCE, run_until_killed

from dp_core.privacy.ledger import Ledger, State


def released(home: Path) -> list[str]:
    path = home / "released"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("point", KILL_POINTS)
def test_a_kill_never_loses_a_charge_nor_redraws_noise(
    ledger: Ledger, url: str, tmp_path: Path, point: str, other_processes: ForkServerContext
) -> None:
    run_until_killed(other_processes, release_in_a_process, url, tmp_path, point)
    entries = ledger.history("notes")
    out = released(tmp_path)
    # The charge is committed before data are read or released; an unknown outcome counts as spent.
    committed = KILL_POINTS.index(point) >= 2
    assert len(entries) == committed
    assert len(out) == (KILL_POINTS.index(point) >= KILL_POINTS.index("after the release"))
    assert ledger.remaining("notes").unsettled == (committed and point != "after the settlement")
    # Each seed has one file, without a second copy under another name.
    seeds = {file.name for file in (tmp_path / "seeds").glob("*")}
    assert seeds <= {"ledger", *(f"{entry.seed_key}.json" for entry in entries)}
    before = ledger.remaining("notes").spent
    # The retry finishes with one entry, one charge, and the noise of the first attempt.
    finished = other_processes.Process(target=release_in_a_process, args=(url, tmp_path, "never"))
    finished.start()
    finished.join(PATIENCE)
    assert finished.exitcode == 0
    (entry,) = ledger.history("notes")
    assert entry.state is State.SETTLED
    assert not committed or (entry.id == entries[0].id)
    assert not committed or ledger.remaining("notes").spent == before
    assert len(released(tmp_path)) == len(out) + 1
    assert len(set(released(tmp_path))) == 1
