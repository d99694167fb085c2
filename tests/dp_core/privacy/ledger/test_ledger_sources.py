"""Records of sources: declarations as public text, and reads as private text of a data set."""

import pytest

from dp_core.errors import BadInput
from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import PrivacyUnit

WIKI, WARD, FOLDER = "1a" * 32, "2b" * 32, "3c" * 32


def test_declaration_is_valid_until_it_is_withdrawn(ledger: Ledger) -> None:
    assert ledger.sources.declaration(WIKI) is None
    declared = ledger.sources.declare_public(WIKI, "wiki")
    assert declared.holds and declared == ledger.sources.declaration(WIKI)
    ledger.sources.declare_public(WIKI, "x" * 300)  # again, with another label
    assert [(s.digest, s.label) for s in ledger.sources.public()] == [(WIKI, "x" * 200)]
    for mark in (WIKI[:7], "", WARD):
        with pytest.raises(BadInput, match="no declarations begin with"):
            ledger.sources.withdraw_public(mark)
    assert ledger.sources.withdraw_public(WIKI[:8]).digest == WIKI
    assert ledger.sources.declaration(WIKI) is None


def test_a_mark_that_two_share_withdraws_neither(ledger: Ledger) -> None:
    for digest in (WIKI, WIKI[:-1] + "0"):
        ledger.sources.declare_public(digest, "wiki")
    with pytest.raises(BadInput, match="2 declarations begin with"):
        ledger.sources.withdraw_public(WIKI[:10])
    ledger.sources.withdraw_public(WIKI)
    assert len(ledger.sources.public()) == 1


def test_private_source_becomes_public_only_by_confirmation(ledger: Ledger) -> None:
    ledger.sources.declare_public(WIKI, "wiki")
    assert ledger.sources.read_as_private(WARD, "notes") == ()
    assert ledger.sources.read_as_private(WARD, "notes") == ()  # a retry
    for digest, contents in ((WARD, []), (FOLDER, [WIKI, WARD])):
        with pytest.raises(BadInput, match=r"private text of notes.*--known-private"):
            ledger.sources.declare_public(digest, "ward", contents=contents)
    assert [s.digest for s in ledger.sources.public()] == [WIKI]
    assert ledger.sources.declare_public(WARD, "ward", known_private=True).holds
    # The source is declared public first and read as private afterwards.
    ledger.sources.read_as_private(WIKI, "notes")
    found = ledger.sources.declaration(WIKI)
    assert found is not None and not found.holds and found.private_in == ("notes",)


def test_same_text_under_two_budgets_is_reported(ledger: Ledger) -> None:
    ledger.register_dataset("letters", PrivacyUnit.PATIENT, 8.0, 1e-5)
    ledger.register_dataset("wing", PrivacyUnit.PATIENT, 8.0, 1e-5, shares_budget_with="notes")
    assert ledger.sources.read_as_private(WARD, "notes") == ()
    assert ledger.sources.read_as_private(WARD, "wing") == ()  # it shares the budget
    assert ledger.sources.read_as_private(WARD, "letters") == ("notes", "wing")
    assert ledger.sources.read_as_private(WIKI, "letters") == ()
    assert ledger.sources.same_files_as("letters") == ("notes", "wing")
    assert ledger.sources.same_files_as("notes") == ledger.sources.same_files_as("wing")
    assert ledger.sources.same_files_as("notes") == ("letters",)
    with pytest.raises(BadInput, match="confide ledger register"):
        ledger.sources.read_as_private(WIKI, "nobodys")


@pytest.mark.parametrize("name", ["Notes", "NOTES", "ｎｏｔｅｓ", "note\u017f", "\u1d3aotes"])
def test_a_name_that_is_spelt_nearly_alike_is_refused(ledger: Ledger, name: str) -> None:
    with pytest.raises(BadInput, match="registered data set notes by its spelling alone"):
        ledger.register_dataset(name, PrivacyUnit.PATIENT, 8.0, 1e-5)
    with pytest.raises(BadInput, match="by its spelling alone"):
        ledger.register_dataset(name, PrivacyUnit.PATIENT, 8.0, 1e-5, shares_budget_with="notes")
    with pytest.raises(BadInput, match="by its spelling alone"):
        ledger.register_made_up(name)
    ledger.register_dataset("notes-2", PrivacyUnit.PATIENT, 8.0, 1e-5)
    assert list(ledger.datasets()) == ["notes", "notes-2"]
