"""Calls on workers: outcomes, errors without private text, and the check of the workers' code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cluster_functions import Echo, broken, nothing, panic, refused, unpicklable

from dp_core.cluster.remote_calls import (
    HostProcess,
    Outcome,
    Version,
    code_digest,
    map_shard,
    packed,
    unpacked,
)
from dp_core.errors import BadInput, ConfideError
from dp_core.privacy.seed_store import PrivacySeed

PLANTED = "Zebulon Quist"
HERE = Version.of(("dp_core",))


def outcome(function: Any, shard: Any, version: Version = HERE) -> Outcome:
    answered: Outcome = unpacked(map_shard(version, packed(function), packed(shard)))
    return answered


def test_value_of_a_shard_may_be_none() -> None:
    assert [outcome(nothing, shard).result() for shard in range(3)] == [0, None, 2]


def test_confide_error_of_a_worker_is_raised_unchanged() -> None:
    with pytest.raises(BadInput) as caught:
        outcome(refused, 3).result()
    error = caught.value
    assert (error.what, error.where, error.fix) == ("an odd shard", "shard 3", "Use even ones.")


@pytest.mark.parametrize("function", [broken, panic])
def test_other_errors_of_a_worker_lose_their_message(function: Any) -> None:
    answered = map_shard(HERE, packed(function), packed(PLANTED))
    assert b"Zebulon" not in answered
    with pytest.raises(ConfideError, match=r"cluster_functions.py:\d+") as caught:
        unpacked(answered).result()
    assert not isinstance(caught.value, BadInput)


def test_unpicklable_value_is_an_error_without_its_text() -> None:
    answered = map_shard(HERE, packed(unpicklable), packed(PLANTED))
    assert b"Zebulon" not in answered
    with pytest.raises(ConfideError, match="a worker failed"):
        unpacked(answered).result()


def test_worker_with_other_code_unpickles_nothing() -> None:
    other = Version(("dp_core",), "another digest")
    answered = unpacked(map_shard(other, b"not a pickle", b"not a pickle"))
    with pytest.raises(BadInput, match="other code or libraries than this step"):
        answered.result()
    host = HostProcess(other, b"not a pickle")
    with pytest.raises(BadInput, match="other code or libraries than this step"):
        host.call(1, 2).result()


def test_code_digest_depends_on_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "a_package_of_ours"
    package.mkdir()
    (package / "__init__.py").write_text("")
    versions = []
    for content in ("x = 1", "x = 2", "x = 1"):
        (package / "inner.py").write_text(content)
        code_digest.cache_clear()
        versions.append(code_digest(("a_package_of_ours",)))
    assert versions[0] == versions[2] != versions[1]
    assert code_digest(("a_package_of_ours", "dp_core")) != versions[0]
    code_digest.cache_clear()


def test_seed_cannot_be_pickled() -> None:
    with pytest.raises(TypeError):
        packed(PrivacySeed.fixed(1))
    with pytest.raises(TypeError):
        packed(Echo(PrivacySeed.fixed(1)))  # type: ignore[arg-type]


CALLS: list[int] = []


def counted() -> Any:
    CALLS.append(1)
    return lambda shared, argument: shared + argument


def test_host_makes_its_function_once() -> None:
    host = HostProcess(HERE, packed(counted))
    assert [host.call(shared, 3).result() for shared in (1, 2)] == [4, 5]
    assert len(CALLS) == 1
