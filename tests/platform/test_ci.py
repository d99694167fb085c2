"""The script that tries the compose stack, where there is no engine to try it on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docker" / "ci"


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("true", 1)])
def test_without_an_engine_continuous_integration_does_not_pass(
    tmp_path: Path, ci: str, code: int
) -> None:
    engine = tmp_path / "docker"
    engine.write_text("#!/bin/sh\nexit 1\n")
    engine.chmod(0o755)
    told = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CI": ci}
    answer = subprocess.run([SCRIPT], env=told, capture_output=True, text=True, check=False)
    assert answer.returncode == code
    assert "was NOT tried" in answer.stderr
