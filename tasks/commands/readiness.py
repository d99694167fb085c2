"""What a run on this machine needs, asked before it registers anything: its files, its device."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from dp_core.errors import BadInput
from tasks.deployment import Deployment
from tasks.specs import JobSettings, missing_file


def refuse_what_is_missing(settings: JobSettings, deployment: Deployment) -> None:
    """Refuse a run whose files are not there, or whose device the steps' environment cannot give.

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
