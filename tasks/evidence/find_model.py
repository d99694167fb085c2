"""Finds the training output from which a model folder was exported."""

from __future__ import annotations

from pathlib import Path

from dp_core.errors import BadInput
from tasks.releases.provenance import MODELS
from tasks.results import KEPT, of_last_model
from tasks.storage import Store, sha256_of

_SUFFIX = ".safetensors"


def origin_of_export(store: Store, folder: Path) -> str:
    """Return the training output whose last model was exported to this folder.

    Raises:
        BadInput: as `find_origin`; or no training of this deployment made the weights, or they
            belong to a model that a training saved before its end.
    """
    if uri := find_origin(store, folder):
        digests = store.digests(uri)
        if not _weights_in(folder) <= {digests[name] for name in of_last_model(digests)}:
            raise BadInput(
                "its training saved this model before the end",
                where=str(folder),
                fix=f"Make evidence of the last model, which has the same claim: --uri {uri}",
            )
        return uri
    raise BadInput(
        "no training of this deployment made these weights",
        where=str(folder),
        fix="Make evidence in the deployment that trained the model, which has its ledger.",
    )


def find_origin(store: Store, folder: Path) -> str | None:
    """Return the output that was exported to this folder, or None if it is not in the store.

    The digests of the weights identify the output. An exported adapter is found by its weights.

    Raises:
        BadInput: there are no weights, or another file of the folder was changed.
    """
    files = {f.relative_to(folder).as_posix(): f for f in folder.rglob("*") if f.is_file()}
    weights = _weights_in(folder)
    if not weights:
        raise BadInput(
            "no model there", where=str(folder), fix="Give a folder from confide export, or --uri."
        )
    for step in MODELS:
        for uri in store.outputs(step):
            digests = store.digests(uri)
            if weights <= set(digests.values()):
                _refuse_changed(folder, files, _exported_with(weights, digests))
                return uri
    return None


def _weights_in(folder: Path) -> set[str]:
    return {sha256_of(file) for file in folder.rglob(f"*{_SUFFIX}") if file.is_file()}


def _exported_with(weights: set[str], digests: dict[str, str]) -> dict[str, str]:
    """Return the digests of the files that are exported with these weights, by their names.

    Models saved during a training have separate subfolders.
    """
    for kept in sorted({name.split("/")[1] for name in digests if name.startswith(f"{KEPT}/")}):
        inside = f"{KEPT}/{kept}/"
        saved = {n.removeprefix(inside): d for n, d in digests.items() if n.startswith(inside)}
        if weights <= set(saved.values()):
            return saved
    return digests


def _refuse_changed(folder: Path, files: dict[str, Path], digests: dict[str, str]) -> None:
    """Refuse a folder with changed files.

    Raises:
        BadInput: a file differs from the exported one.
    """
    for name, file in files.items():
        expected = digests.get(name)
        if expected is not None and sha256_of(file) != expected:
            raise BadInput(
                f"{name} was changed after the export",
                where=str(folder),
                fix="Export the model again.",
            )
