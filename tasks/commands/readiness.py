"""What a run on this machine needs, asked before it registers anything: its files, its device."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

from dp_core.errors import BadInput
from tasks.deployment import Deployment
from tasks.specs import CAUSAL, JobSettings


def refuse_what_is_missing(settings: JobSettings, deployment: Deployment) -> None:
    """Refuse a run whose files are not there, or whose device the steps' environment cannot give.

    Raises:
        BadInput: names the setting.
    """
    if deployment.launcher != "process":
        return  # what containers see and hold, this machine cannot know
    for name, path in _paths(settings).items():
        if not os.access(path, os.F_OK):
            raise BadInput(f"no such file or folder: {path}", where=name)
        if not os.access(path, os.R_OK):
            raise BadInput(f"may not be read: {path}", where=name)
    if settings.device in ("gpu", "tpu") and _processor_only(deployment):
        raise BadInput(
            f"the TensorFlow of this environment (tensorflow-cpu) drives no {settings.device}",
            where="device",
            fix="Choose cpu or mock-tpu:N; docs/cloud.md has images for others.",
        )


def _paths(settings: JobSettings) -> dict[str, Path]:
    """Return the local files that the job reads, by setting. Formats that read none have none."""
    named = {
        "private_path": settings.private_path,
        "public_path": settings.public_path,
        "public_model": settings.public_model,
    }
    if settings.model_kind != CAUSAL:  # which is not fine-tuned for entities
        named |= {
            "entities_train": settings.entities_train,
            "entities_test": settings.entities_test,
        }
    return {name: Path(path) for name, path in named.items() if path and "://" not in path}


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
