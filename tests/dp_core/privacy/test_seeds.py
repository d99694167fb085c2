import copy
import json
import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import Gate, run_at_once, run_until_killed

from dp_core.errors import BadInput
from dp_core.privacy.seed_store import PrivacySeed, SeedStore

PARTS = st.one_of(st.binary(max_size=6), st.text(max_size=4), st.integers())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_seed_comes_from_the_operating_system_and_is_its_owners_alone(tmp_path):
    before = os.umask(0)
    try:
        seed = SeedStore(tmp_path / "seeds").create("a")
    finally:
        os.umask(before)
    assert mode(tmp_path / "seeds") == 0o700
    assert mode(tmp_path / "seeds" / "a.json") == 0o600
    assert not seed.known
    body = json.loads((tmp_path / "seeds" / "a.json").read_text())
    assert len(bytes.fromhex(body["secret"])) == 32
    other = SeedStore(tmp_path / "seeds").create("b")
    assert other.salted_hash() != seed.salted_hash()


def create_in_a_process(directory: Path, gate: Gate) -> str:
    gate.wait()
    return SeedStore(directory).create("contended").salted_hash()


def test_many_processes_create_one_seed(tmp_path, other_processes):
    hashes = run_at_once(other_processes, create_in_a_process, [(tmp_path / "seeds",)] * 8)
    assert len(set(hashes)) == 1
    assert [p.name for p in (tmp_path / "seeds").iterdir()] == ["contended.json"]


def test_of_two_that_find_no_seed_the_first_draw_stays(tmp_path, monkeypatch):
    store = SeedStore(tmp_path / "seeds")
    first = store.create("a").salted_hash()
    monkeypatch.setattr(Path, "exists", lambda self: False)  # as in a process that looked earlier
    assert store.create("a").salted_hash() == first


def test_the_secret_does_not_show(tmp_path):
    seed = SeedStore(tmp_path / "seeds").create("a")
    secret = json.loads((tmp_path / "seeds" / "a.json").read_text())["secret"]
    for shown in (repr(seed), str(seed), f"{seed}", seed.salted_hash(), str([seed])):
        assert secret not in shown
        assert secret[:16] not in shown
    assert repr(PrivacySeed.fixed(1)) == "PrivacySeed(known)"
    with pytest.raises(TypeError, match="does not leave its process"):
        copy.deepcopy(seed)  # fails like pickling


def test_the_hash_is_salted(tmp_path):
    one, two = (PrivacySeed(b"x" * 32, salt * 16, known=True) for salt in (b"1", b"2"))
    assert one.salted_hash() != two.salted_hash()
    assert one.salted_hash().split(":")[1] != two.salted_hash().split(":")[1]
    assert one.derive("p") == two.derive("p")


@pytest.mark.parametrize("right", [0o640, 0o604, 0o666])
def test_a_seed_that_others_can_read_is_refused(tmp_path, right):
    store = SeedStore(tmp_path / "seeds")
    store.create("a")
    (tmp_path / "seeds" / "a.json").chmod(right)
    with pytest.raises(BadInput, match="chmod 600"):
        store.get("a")


def test_a_folder_that_others_can_read_is_refused(tmp_path):
    (tmp_path / "seeds").mkdir(mode=0o755)
    with pytest.raises(BadInput, match="chmod 700"):
        SeedStore(tmp_path / "seeds").create("a")
    assert list((tmp_path / "seeds").iterdir()) == []


def test_a_broken_file_is_refused_without_showing_it(tmp_path):
    store = SeedStore(tmp_path / "seeds")
    store.create("a")
    path = tmp_path / "seeds" / "a.json"
    secret = json.loads(path.read_text())["secret"]
    for broken in (path.read_text()[:-5], json.dumps({"version": 2, "secret": secret})):
        path.write_text(broken)
        with pytest.raises(BadInput) as caught:
            store.get("a")
        assert secret[:8] not in str(caught.value)
        assert caught.value.__cause__ is None


@pytest.mark.parametrize("key", ["", "../a", "a/b", ".hidden", "x" * 129, "a\n"])
def test_a_key_is_a_plain_name(tmp_path, key):
    with pytest.raises(BadInput):
        SeedStore(tmp_path).create(key)


def test_too_short_a_secret_is_refused():
    with pytest.raises(BadInput, match="128 bits"):
        PrivacySeed(b"x" * 15, b"", known=True)


@given(st.lists(PARTS, max_size=4), st.lists(PARTS, max_size=4))
def test_different_contexts_give_different_bytes(one, two):
    seed = PrivacySeed.fixed(0)
    same = [(type(p), p) for p in one] == [(type(p), p) for p in two]
    assert (seed.derive("p", *one) == seed.derive("p", *two)) == same


def test_derived_bytes_do_not_change_between_releases() -> None:
    # A changed encoding would redraw the noise of a run that is resumed after an upgrade.
    derived = PrivacySeed.fixed(0).derive("noise", b"manifest", 3, "variable", 0)
    assert derived.hex() == "4f9982721147012903da9546f4b153d3a780e7609030ec3ef718dbf4ad451be9"


def test_the_folder_remembers_the_first_ledger_and_no_other(tmp_path):
    seeds = SeedStore(tmp_path / "seeds")
    assert seeds.remembered_ledger() is None
    seeds.create("entry")
    for identity in ("one", "another"):
        seeds.remember_ledger(identity)
    assert seeds.remembered_ledger() == "one"
    assert seeds.drawn() == {"entry"}
    assert all(mode(file) == 0o600 for file in (tmp_path / "seeds").iterdir())


def die_at_link(directory: Path, nameless: bool, after: bool) -> None:
    link = os.link

    def linking(*arguments: Any, **more: Any) -> None:
        if nameless and "/proc/" not in str(arguments[0]):
            raise OSError
        if after:
            link(*arguments, **more)
        os.kill(os.getpid(), signal.SIGKILL)

    os.link = linking
    if not nameless:
        del os.O_TMPFILE
    SeedStore(directory).create("a")


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("nameless", [True, False])
def test_a_kill_leaves_no_second_copy_of_a_seed(tmp_path, other_processes, nameless, after):
    folder = tmp_path / "seeds"
    run_until_killed(other_processes, die_at_link, folder, nameless, after)
    if nameless:
        assert [f.name for f in folder.iterdir()] == ["a.json"] * after
        return
    # On file systems without unnamed files, drawing the next seed removes the leftover file.
    for left in folder.glob(".*"):
        os.utime(left, (0, 0))
    SeedStore(folder).create("b")
    assert {f.name for f in folder.iterdir()} - {"a.json"} == {"b.json"}
    assert (folder / "a.json").exists() == after


def test_what_another_process_is_writing_is_left_alone(tmp_path):
    (tmp_path / "seeds").mkdir(mode=0o700)
    (tmp_path / "seeds" / ".a.0123456789abcdef").touch()
    SeedStore(tmp_path / "seeds").create("b")
    assert (tmp_path / "seeds" / ".a.0123456789abcdef").exists()
