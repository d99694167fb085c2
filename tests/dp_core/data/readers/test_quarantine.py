"""Quarantine counts with reason and place, and refuses what is mostly bad."""

import pytest

from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.errors import BadInput


def test_counts_and_first_places() -> None:
    q = Quarantine()
    for i in range(100):
        q.reject(Reason.EMPTY, f"f:{i}")
    q.take()
    q.leave_out()
    summary = q.summary()
    assert summary["taken"] == summary["left_out"] == 1
    assert summary["rejected"] == {"no text": 100}
    assert q.places[Reason.EMPTY][0] == "f:0"
    assert len(q.places[Reason.EMPTY]) == 20


@pytest.mark.parametrize(
    ("good", "bad", "refused"), [(90, 10, False), (89, 11, True), (0, 1, True)]
)
def test_refuses_above_the_share(good: int, bad: int, refused: bool) -> None:
    q = Quarantine(largest_share=0.1)
    for _ in range(good):
        q.take()
    for i in range(bad):
        q.reject(Reason.ENCODING, f"f:{i}")
    if refused:
        with pytest.raises(BadInput, match=r"(more than 10%|none) of .* not UTF-8") as error:
            q.finish("source")
        assert "f:0" not in str(error.value)  # a file's name may be a patient's
    else:
        q.finish("f")


def test_nothing_at_all_is_refused() -> None:
    with pytest.raises(BadInput, match="nothing to read"):
        Quarantine().finish("f")
    only_errors = Quarantine()
    only_errors.leave_out()
    with pytest.raises(BadInput, match="nothing to read"):
        only_errors.finish("f")
