"""Declarations: sources are public on the operator's word alone; private sources are remembered.

A job may call any file public, and its author chooses the settings. Every file from outside the
store is therefore opened by this module only. It is read as public only if the operator has
declared its content public on the command line (`confide ledger declare-public`). The ledger
remembers the keyed digest of every private source. See docs/adr/0013-sources-and-public-data.md.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from dp_core.data.readers.sources import entries
from dp_core.errors import BadInput, PrivateTextRefusal, is_full_disk
from dp_core.privacy.ledger import Ledger, PublicSource
from tasks.context import StepContext, content_key
from tasks.protocol.messages import StepResult
from tasks.protocol.settings import MADE_UP
from tasks.protocol.specs import Need, Source, StepSpec
from tasks.releases.deployment_ledger import open_ledger, refuse_unregistered
from tasks.releases.provenance import MODELS
from tasks.results import STATEMENT_DATA, read_result
from tasks.runtime.deployment import Deployment
from tasks.runtime.log import log
from tasks.storage.backends import is_remote, keyed_digest, local_path, stage_source
from tasks.storage.store import sha256_of

_NO_MODEL_OF_OURS = "Only models made without private text are public sources."


@dataclass(frozen=True)
class Opened:
    """A source that may be read: its path on this disk, and the keyed digest of its content."""

    path: Path
    digest: str


def open_source(source: Source, context: StepContext) -> Opened:
    """Return a source's files on this disk, if the ledger agrees with the spec.

    A public source is copied for this step, so that it cannot change between the check and the
    reading.

    Raises:
        BadInput: the source was not declared public, its data set is registered differently, or
            the file does not exist.
    """
    folder = context.durable / "source" / source.field
    ledger = _ledger(source, context)
    try:
        path = stage_source(source.uri, folder, field=source.field)
        if source.public and not is_remote(source.uri):
            path = _copied(path, folder, source.field)
        opened = _opened(path, source, context)
        _refuse_disagreement(opened.digest, source, ledger, context)
        return opened
    except BadInput:
        shutil.rmtree(folder, ignore_errors=True)  # keep no copy of a refused source
        raise


def open_for_operator(source: Source, context: StepContext) -> Opened:
    """Return a source's files on this disk for the operator only, without a look at the ledger.

    All results about such a source stay with the operator.

    Raises:
        BadInput: the file does not exist.
    """
    folder = context.durable / "source" / source.field
    return _opened(stage_source(source.uri, folder, field=source.field), source, context)


def _opened(path: Path, source: Source, context: StepContext) -> Opened:
    digest = context.source_digests[source.field] = keyed_digest(path, context.content_key())
    return Opened(path, digest)


def record_sources(sources: Iterable[Source], context: StepContext) -> None:
    """Check every source of a run against the ledger, before anything is charged.

    A public source must be declared. A private source is remembered. Only digests are computed: a
    step with write access to the ledger parses no files.

    Raises:
        BadInput: as `open_source`.
    """
    for source in sources:
        ledger = _ledger(source, context)
        digest = _digest_elsewhere(source, context.deployment)
        _refuse_disagreement(digest, source, ledger, context)


def refuse_if_changed(spec: StepSpec, result: StepResult, context: StepContext) -> None:
    """Refuse an earlier result if its source files have changed.

    A step that reads the ledger also refuses files that are no longer public.

    Raises:
        BadInput: the files have changed; or as `open_source`.
    """
    for source in spec.sources:
        opened = open_for_operator(source, context)
        if Need.LEDGER in spec.needs:
            _refuse_disagreement(opened.digest, source, _ledger(source, context), context)
    if context.source_digests != result.facts["source_digests"]:
        raise PrivateTextRefusal(
            "the files have changed since they were read",
            where=", ".join(source.field for source in spec.sources),
            fix="Give the new files a new data_version.",
        )


def refuse_undeclared(sources: Iterable[Source], deployment: Deployment) -> None:
    """Refuse undeclared sources that the run calls public, before the run begins.

    Raises:
        BadInput: names the first such source, and the command by which the operator declares it.
    """
    ledger = open_ledger(deployment, deployment.open_store())
    for source in sources:
        _refuse_undeclared(_digest_elsewhere(source, deployment), source, ledger)


def declare_public(uri: str, deployment: Deployment, *, known_private: bool) -> PublicSource:
    """Declare a file or folder public. Only the operator can do this, never a job.

    Raises:
        BadInput: the source does not exist, this deployment made it, or it was read as private.
    """
    where = f"declare-public {uri}"
    if _is_among_ours(uri, deployment):
        raise BadInput(
            "it holds, or lies among, what this deployment has made, from private text too",
            where=where,
            fix="Only files from elsewhere are public sources.",
        )
    key = content_key(deployment)
    with _temporary_folder(deployment) as folder:
        path = stage_source(uri, folder, field=where)
        files = entries(path, where) if path.is_dir() else []
        if any(file.name == STATEMENT_DATA for file in files):
            raise BadInput(
                f"it holds a {STATEMENT_DATA}: a model that Confide made, of private text too",
                where=where,
                fix=_NO_MODEL_OF_OURS,
            )
        _refuse_our_weights(files or [path], deployment, where)
        return Ledger.open(deployment.ledger).sources.declare_public(
            keyed_digest(path, key),
            _label(uri),
            contents=[keyed_digest(file, key) for file in files],
            known_private=known_private,
        )


def _refuse_our_weights(files: Sequence[Path], deployment: Deployment, where: str) -> None:
    """Refuse a copy of a model that this deployment made from private text.

    Raises:
        BadInput: the weights are byte for byte equal to the weights of such a model.
    """
    weights = {sha256_of(file) for file in files if file.suffix == ".safetensors"}
    store = deployment.open_store()
    for step in MODELS if weights else ():
        for uri in store.outputs(step):
            if weights.isdisjoint(store.digests(uri).values()):
                continue
            result = read_result(store, uri)
            if result is not None and result.releases:
                raise BadInput(
                    f"its weights are those of {uri}, which was made of private text",
                    where=where,
                    fix=_NO_MODEL_OF_OURS,
                )


def _digest_elsewhere(source: Source, deployment: Deployment) -> str:
    """Return the keyed digest of a source without keeping a copy of it."""
    with _temporary_folder(deployment) as folder:
        path = stage_source(source.uri, folder, field=source.field)
        return keyed_digest(path, content_key(deployment))


@contextmanager
def _temporary_folder(deployment: Deployment) -> Iterator[Path]:
    """Yield a temporary folder for copies of remote sources; processes may share the home."""
    deployment.work.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="asked-", dir=deployment.work) as folder:
        yield Path(folder) / "source"


def _is_among_ours(uri: str, deployment: Deployment) -> bool:
    """Return whether a path is inside the deployment's store or home, or contains one of them."""
    if is_remote(uri):
        place, store = f"{uri.rstrip('/')}/", f"{deployment.store}/"
        return place.startswith(store) or store.startswith(place)
    folders = [deployment.home]
    if not is_remote(deployment.store):
        folders.append(local_path(deployment.store))
    path = local_path(uri).resolve()
    return any(
        path.is_relative_to(folder.resolve()) or folder.resolve().is_relative_to(path)
        for folder in folders
    )


def _ledger(source: Source, context: StepContext) -> Ledger:
    """Return the ledger, after a check that the data set's registration agrees with the spec."""
    if source.public and not source.dataset:
        return open_ledger(context.deployment, context.store)
    if not source.public and source.dataset == MADE_UP:
        raise BadInput(
            f"the data set {MADE_UP} is the project's own made-up notes, and these are files",
            where=source.field,
            fix="Give the private data set a separate name.",
        )
    return refuse_unregistered(context, source.dataset)


def _refuse_disagreement(digest: str, source: Source, ledger: Ledger, context: StepContext) -> None:
    """Refuse a source that the ledger does not know as the spec describes it."""
    if source.public:
        _refuse_undeclared(digest, source, ledger)
    elif context.deployment.holds_seeds:  # run by hand, with write access to the ledger
        _remember(digest, source, ledger)
    elif not ledger.sources.is_text_of(digest, source.dataset):
        raise PrivateTextRefusal(
            f"the run's first step has not written these files down as {source.dataset}",
            where=source.field,
            fix="If they have changed since, give them a new data_version.",
        )


def _remember(digest: str, source: Source, ledger: Ledger) -> None:
    """Remember a private source's data set; warn if another budget covers the same files."""
    if others := ledger.sources.read_as_private(digest, source.dataset):
        log(
            f"WARNING: the files of {source.dataset} are those of {', '.join(others)} too, whose "
            "budget is another: what both budgets allow is spent on the same people. Register one "
            "of them with --shares-budget-with, under a new name, and use that.",
            "warning",
        )


def _refuse_undeclared(digest: str, source: Source, ledger: Ledger) -> None:
    declared = ledger.sources.declaration(digest)
    command = f"confide ledger declare-public {shlex.quote(source.uri)}"
    if declared is None:
        # The message does not depend on private readings: it must not confirm a guessed text.
        raise BadInput(
            f"{source.uri} was not declared public",
            where=source.field,
            fix=f"If it is, the operator says so: {command}",
        )
    if not declared.holds:
        raise PrivateTextRefusal(
            f"{source.uri} was declared public, and has been read as private text of "
            f"{', '.join(declared.private_in)}",
            where=source.field,
            fix=f"If it is public all the same, the operator says so: {command} --known-private",
        )


def _copied(path: Path, folder: Path, field: str) -> Path:
    """Copy a whole file or folder under its name."""
    shutil.rmtree(folder, ignore_errors=True)
    copy = folder / (path.name or "source")
    try:
        folder.mkdir(parents=True)
        for file in entries(path, field):
            target = copy / file.relative_to(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    except OSError as error:
        if is_full_disk(error):
            raise
        raise BadInput(
            f"a file of it cannot be read ({os.strerror(error.errno or 0)})", where=field
        ) from None
    return copy


def _label(uri: str) -> str:
    name = uri.rstrip("/").rpartition("/")[2] if is_remote(uri) else local_path(uri).name
    return "".join(c if c.isprintable() else "?" for c in name) or "/"
