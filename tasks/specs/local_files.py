"""Which files of this machine a job reads: asked where they are before anything is registered."""

from __future__ import annotations

import os

from tasks.specs.settings import JobSettings
from tasks.specs.steps import CAUSAL


def missing_file(settings: JobSettings) -> tuple[str, str] | None:
    """Return the first setting whose file a step here could not read, and why; None: all are there.

    Only where steps run on this machine, as this user: what containers see, it cannot know.
    """
    for name, path in local_files(settings).items():
        place = os.path.expanduser(path)  # noqa: PTH111 - Path's refuses what it cannot expand
        if not os.path.isabs(place):  # noqa: PTH117 - as the line above
            return name, f"a path must be absolute: {path}"
        if "\0" in place or not os.access(place, os.F_OK):
            return name, f"no such file or folder: {path}"
        is_folder = os.path.isdir(place)  # noqa: PTH112 - as the line above
        if not (is_folder or os.path.isfile(place)):  # noqa: PTH113 - as the line above
            return name, f"neither a file nor a folder: {path}"
        if not os.access(place, os.R_OK | os.X_OK if is_folder else os.R_OK):
            return name, f"may not be read: {path}"
    return None


def local_files(settings: JobSettings) -> dict[str, str]:
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
            "entities_patients": settings.entities_patients,
        }
    return {name: path for name, path in named.items() if path and "://" not in path}
