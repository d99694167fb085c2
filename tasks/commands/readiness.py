"""What a run on this machine needs, asked before it registers anything: its files, its device."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from dp_core.errors import BadInput
from tasks.protocol import JobSettings, budget_of_run, missing_file
from tasks.runtime.deployment import Deployment


def refuse_what_is_missing(settings: JobSettings, deployment: Deployment) -> None:
    """Refuse a run whose files are not there, or whose device the steps' environment cannot give.

    Refuse, too, what the run calls public and the operator has not declared so.

    Raises:
        BadInput: names the setting.
    """
    if missing := missing_file(settings):
        name, reason = missing
        raise BadInput(reason, where=name)
    if settings.device in ("gpu", "tpu") and _processor_only(deployment):
        raise BadInput(
            f"the TensorFlow of this environment (tensorflow-cpu) drives no {settings.device}",
            where="device",
            fix="Choose cpu or mock-tpu:N; docs/cloud.md has images for others.",
        )
    _refuse_undeclared(settings, deployment)


def _refuse_undeclared(settings: JobSettings, deployment: Deployment) -> None:
    """Ask of this machine's files; those of a bucket are asked for by the run's first step."""
    budget = budget_of_run(settings, deployment.store)
    local = [source for source in budget.called_public if "://" not in source.uri]
    if local:  # what it takes to ask the ledger is imported for those alone
        from tasks.releases.declarations import refuse_undeclared

        deployment.prepare()
        refuse_undeclared(local, deployment)


def _processor_only(deployment: Deployment) -> bool:
    """Return whether the steps' environment is this one, and its TensorFlow the processor's.

    By its packages alone: to import TensorFlow takes seconds.
    """
    python = Path(deployment.task_python)
    if python.exists() and python.parent.parent.resolve() != Path(sys.prefix).resolve():
        return False  # another environment, whose packages are not ours to read
    installed = {name for name in ("tensorflow", "tensorflow-cpu") if _is_installed(name)}
    return installed == {"tensorflow-cpu"}


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
