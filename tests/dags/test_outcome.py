"""Exit codes: what is tried again, what never is, and the one line that says why."""

import pytest
from airflow.sdk.exceptions import AirflowFailException

from dags.launcher.outcome import failure


@pytest.mark.parametrize(("code", "word"), [(2, "bad input"), (3, "privacy budget exceeded")])
def test_bad_input_and_an_exceeded_budget_are_never_tried_again(code, word):
    error = failure("vocabulary", code, "confide: vocabulary: the words of the step")
    assert isinstance(error, AirflowFailException)
    assert str(error) == f"the words of the step (exit code {code}: {word}, not tried again)"


@pytest.mark.parametrize(
    ("code", "words"), [(1, "exit code 1"), (143, "exit code 143"), (-9, "signal 9")]
)
def test_a_fault_is_tried_again(code, words):
    error = failure("pretrain", code, "confide: pretrain: disk full")
    assert not isinstance(error, AirflowFailException)
    assert str(error) == f"disk full ({words})"
