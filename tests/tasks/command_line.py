"""`confide …` as a person calls it, within the test's own process."""

from __future__ import annotations

import sys

import pytest

from tasks import cli


def confide(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
    """Return its exit code, and what it said on standard output and standard error."""
    monkeypatch.setattr(sys, "argv", ["confide", *words])
    code = cli.main()
    said = capsys.readouterr()
    return code, said.out, said.err
