"""Which model of the store is meant: by its URI, by an exported folder, or the latest one."""

from __future__ import annotations

from pathlib import Path

from dp_core.errors import BadInput
from tasks.releases.provenance import MODELS
from tasks.results.statements import KEPT, of_last_model
from tasks.storage import Store, sha256_of

_SUFFIX = ".safetensors"


def origin_of_export(store: Store, folder: Path) -> str:
    """Return the output of whose last model a folder is the exported copy, file by file.

    Raises:
        BadInput: as `find_origin`; or no training of this deployment made the weights, or they are
            those of a model that it kept on the way.
    """
    if uri := find_origin(store, folder):
        made = store.digests(uri)
        if not _weights_in(folder) <= {made[name] for name in of_last_model(made)}:
            raise BadInput(
                "it is a model that its training kept on the way",
                where=str(folder),
                fix=f"Evidence is of the last one, with the same claim: --uri {uri}",
            )
        return uri
    raise BadInput(
        "no training of this deployment made these weights",
        where=str(folder),
        fix="Evidence is made where the model was trained: there is its ledger.",
    )


def find_origin(store: Store, folder: Path) -> str | None:
    """Return the output of which a folder is the exported copy; None: it is somebody else's model.

    The weights find it: no other training has the same. An adapter by itself is found by its own.

    Raises:
        BadInput: there are no weights, or a file beside them is not the one that was exported.
    """
    files = {f.relative_to(folder).as_posix(): f for f in folder.rglob("*") if f.is_file()}
    weights = _weights_in(folder)
    if not weights:
        raise BadInput(
            "no model there", where=str(folder), fix="Give what confide export wrote, or --uri."
        )
    for step in MODELS:
        for uri in store.outputs(step):
            made = store.digests(uri)
            if weights <= set(made.values()):
                _refuse_changed(folder, files, _exported_with(weights, made))
                return uri
    return None


def _weights_in(folder: Path) -> set[str]:
    return {sha256_of(file) for file in folder.rglob(f"*{_SUFFIX}") if file.is_file()}


def _exported_with(weights: set[str], made: dict[str, str]) -> dict[str, str]:
    """Return the files that were exported with these weights, by their names there.

    Those of a model that was kept on the way lie in a folder of their own.
    """
    for kept in sorted({name.split("/")[1] for name in made if name.startswith(f"{KEPT}/")}):
        inside = f"{KEPT}/{kept}/"
        own = {n.removeprefix(inside): d for n, d in made.items() if n.startswith(inside)}
        if weights <= set(own.values()):
            return own
    return made


def _refuse_changed(folder: Path, files: dict[str, Path], made: dict[str, str]) -> None:
    """Refuse a copy that was changed since.

    Raises:
        BadInput: names the file.
    """
    for name, file in files.items():
        expected = made.get(name)
        if expected is not None and sha256_of(file) != expected:
            raise BadInput(
                f"{name} is not the file that was exported",
                where=str(folder),
                fix="Export the model anew.",
            )
