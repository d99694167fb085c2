from pathlib import Path

import pytest

from tasks.runtime.deployment import Deployment


@pytest.fixture
def untracked(e2e_home: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    """A deployment whose MLflow does not answer."""
    monkeypatch.setenv("CONFIDE_TRACKING", "http://127.0.0.1:9")
    deployment = Deployment.from_environment()
    deployment.prepare()
    return deployment
