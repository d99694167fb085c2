"""Calls the command line `confide` within the test process."""

import json
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tasks import cli

REFUSED = tomllib.loads(Path(__file__).with_name("refused_commands.toml").read_text())


def refused_commands(kind: str) -> list[tuple[str, str]]:
    """Return each refused command line of a kind, and the reason in its error."""
    return [(case["command"], case["reason"]) for case in REFUSED[kind]]


@dataclass(frozen=True)
class Confide:
    """The command line; the fixture `confide` makes one."""

    patch: pytest.MonkeyPatch
    captured: pytest.CaptureFixture[str]

    def __call__(self, *words: object) -> tuple[int, str, str]:
        """Return the exit code, the standard output and the standard error."""
        self.captured.readouterr()  # discard earlier output
        self.patch.setattr(sys, "argv", ["confide", *map(str, words)])
        code = cli.main()
        output = self.captured.readouterr()
        return code, output.out, output.err

    def json(self, *words: object) -> Any:
        """Return the parsed answer of a command with --json, which must succeed."""
        code, out, err = self(*words, "--json")
        assert (code, err) == (0, ""), err
        return json.loads(out)

    def refused(self, *words: object) -> str:
        """Return the single line of a command that must be refused with exit code 2."""
        code, out, err = self(*words)
        assert (code, out, err.count("\n")) == (2, "", 1), (out, err)
        assert err.startswith("confide: ")
        return err

    def register(self, *more: str, epsilon: float = 8, dataset: str = "notes") -> Any:
        """Register a data set of patients with δ = 1e-5; return its budget."""
        words = ["ledger", "register", dataset, "--unit", "patient", "--delta", "1e-5"]
        return self.json(*words, "--epsilon", epsilon, *more)


def set_options(**settings: object) -> list[str]:
    """Return the options `--set` of settings."""
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
