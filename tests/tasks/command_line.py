"""`confide …` as a person calls it, within the test's own process."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from tasks import cli


@dataclass(frozen=True)
class Confide:
    """The command line; the fixture `confide` makes one."""

    patch: pytest.MonkeyPatch
    captured: pytest.CaptureFixture[str]

    def __call__(self, *words: object) -> tuple[int, str, str]:
        """Return its exit code, and what it said on standard output and standard error."""
        self.captured.readouterr()  # what steps said before
        self.patch.setattr(sys, "argv", ["confide", *map(str, words)])
        code = cli.main()
        said = self.captured.readouterr()
        return code, said.out, said.err

    def json(self, *words: object) -> Any:
        """Return what it answers with --json; it must succeed."""
        code, out, err = self(*words, "--json")
        assert (code, err) == (0, ""), err
        return json.loads(out)
