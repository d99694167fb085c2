"""Declarations: which sources are public, on the operator's word alone, and whose the others are.

A job may call any file public, and who starts jobs chooses its settings. So what a step reads from
outside the store is opened here and nowhere else, and is read as public only if the operator has
declared its content so, on the command line (`confide ledger declare-public`). What is read as a
private data set is remembered by its keyed digest. docs/adr/0013-sources-and-public-data.md.
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
from tasks.protocol import Source, StepSpec
from tasks.protocol.settings import MADE_UP
from tasks.releases.ledger import open_ledger, refuse_unregistered
from tasks.releases.provenance import MODELS
from tasks.results.inputs import read_result
from tasks.results.statements import DATA as STATEMENT
from tasks.runtime.deployment import Deployment
from tasks.runtime.log import log
from tasks.storage import is_remote, keyed_digest, local_path, sha256_of, stage_source

_NO_MODEL_OF_OURS = "Only models that nobody's private text went into are public sources."
_KEY = "content-digest"  # what the secret is derived for: the same as of the steps' outputs


@dataclass(frozen=True)
class Opened:
    """A source that may be read: where it lies now, and the keyed digest of what lies there."""

    path: Path
    digest: str


def open_source(source: Source, context: StepContext) -> Opened:
    """Return a source's files on this disk, if the ledger agrees with what the spec says of them.

    What is called public is a copy of the step's own: nobody changes it between the look and the
    reading.

    Raises:
        BadInput: nobody declared it public, or its data set is registered for something else, or
            there is no such file.
    """
    folder = context.durable / "source" / source.field
    ledger = _ledger(source, context)
    try:
        path = stage_source(source.uri, folder, field=source.field)
        if source.public and not is_remote(source.uri):
            path = _copied(path, folder, source.field)
        return Opened(path, _agreed_digest(path, source, ledger, context))
    except BadInput:
        shutil.rmtree(folder, ignore_errors=True)  # what may not be read does not stay here
        raise


def open_for_operator(source: Source, context: StepContext) -> Opened:
    """Return files on this disk of which nothing is released: no ledger is asked.

    All that a step says of them is the operator's.

    Raises:
        BadInput: there is no such file.
    """
    folder = context.durable / "source" / source.field
    path = stage_source(source.uri, folder, field=source.field)
    return Opened(path, keyed_digest(path, context.content_key()))


def record_sources(sources: Iterable[Source], context: StepContext) -> None:
    """Ask the ledger of everything that a run will read, before anything is charged.

    What is called public must be declared; what is private is remembered. Only digests are taken:
    a step that may write the ledger parses nothing.

    Raises:
        BadInput: as `open_source`.
    """
    for source in sources:
        ledger = _ledger(source, context)
        digest = _digest_elsewhere(source, context.deployment)
        if source.public:
            _refuse_undeclared(digest, source, ledger)
        else:
            _remember(digest, source, ledger)


def refuse_if_changed(
    spec: StepSpec, digests: Sequence[str], context: StepContext, version: str
) -> None:
    """Refuse to answer with what was read from files that have changed, or are no longer public.

    Raises:
        BadInput: they have; or as `open_source`.
    """
    now = []
    for source in spec.sources:
        path = stage_source(
            source.uri, context.durable / "source" / source.field, field=source.field
        )
        now.append(_agreed_digest(path, source, _ledger(source, context), context))
    refuse_other_digests(spec, now, digests, version)


def refuse_other_digests(
    spec: StepSpec, now: Sequence[str], before: Sequence[str], version: str
) -> None:
    """Refuse to answer with what was read from files that have changed.

    Raises:
        BadInput: they have.
    """
    if list(now) != list(before):
        raise PrivateTextRefusal(
            f"the files have changed since data_version {version!r} was read",
            where=", ".join(source.field for source in spec.sources),
            fix="Give the new files a new data_version.",
        )


def refuse_undeclared(sources: Iterable[Source], deployment: Deployment) -> None:
    """Refuse sources that are called public and were not declared so, before a run begins.

    Raises:
        BadInput: names the first, and the command by which the operator declares it.
    """
    ledger = open_ledger(deployment, deployment.open_store())
    for source in sources:
        _refuse_undeclared(_digest_elsewhere(source, deployment), source, ledger)


def declare_public(uri: str, deployment: Deployment, *, known_private: bool) -> PublicSource:
    """Declare a file or folder public: the operator's word, which no job can give.

    Raises:
        BadInput: it is not there, or what this deployment made, or it was read as private.
    """
    where = f"declare-public {uri}"
    if _is_among_ours(uri, deployment):
        raise BadInput(
            "it holds, or lies among, what this deployment has made, from private text too",
            where=where,
            fix="Only files from elsewhere are public sources.",
        )
    key = content_key(deployment, _KEY)
    with _temporary_folder(deployment) as folder:
        path = stage_source(uri, folder, field=where)
        files = entries(path, where) if path.is_dir() else []
        if any(file.name == STATEMENT for file in files):
            raise BadInput(
                f"it holds a {STATEMENT}: a model that Confide made, of private text too",
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
    """Refuse a copy of a model that was made here of private text, also without its statement.

    Raises:
        BadInput: the weights are those of such a model, byte for byte.
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
    """Return the keyed digest of a source that is not read now: no copy of it stays here."""
    with _temporary_folder(deployment) as folder:
        path = stage_source(source.uri, folder, field=source.field)
        return keyed_digest(path, content_key(deployment, _KEY))


@contextmanager
def _temporary_folder(deployment: Deployment) -> Iterator[Path]:
    """Give a folder for copies of remote sources, and remove it: processes may share the home."""
    deployment.work.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="asked-", dir=deployment.work) as folder:
        yield Path(folder) / "source"


def _is_among_ours(uri: str, deployment: Deployment) -> bool:
    """Whether a path is in the deployment's store or home, or they are in it."""
    if is_remote(uri):
        one, other = f"{uri.rstrip('/')}/", f"{deployment.store}/"
        return one.startswith(other) or other.startswith(one)
    folders = [deployment.home]
    if not is_remote(deployment.store):
        folders.append(local_path(deployment.store))
    path = local_path(uri).resolve()
    return any(
        path.is_relative_to(folder.resolve()) or folder.resolve().is_relative_to(path)
        for folder in folders
    )


def _ledger(source: Source, context: StepContext) -> Ledger:
    """Return the ledger, in which the source's data set is what the spec says it is."""
    if source.public and not source.dataset:
        return open_ledger(context.deployment, context.store)
    if not source.public and source.dataset == MADE_UP:
        raise BadInput(
            f"the data set {MADE_UP} is the project's own made-up notes, and these are files",
            where=source.field,
            fix="Give the private data set a name of its own.",
        )
    return refuse_unregistered(context, source.dataset)


def _agreed_digest(path: Path, source: Source, ledger: Ledger, context: StepContext) -> str:
    """Return the keyed digest of a source that may be read as what the spec says it is."""
    digest = keyed_digest(path, context.content_key())
    if source.public:
        _refuse_undeclared(digest, source, ledger)
    elif context.deployment.holds_seeds:  # run by hand, by who may write the ledger
        _remember(digest, source, ledger)
    elif not ledger.sources.is_text_of(digest, source.dataset):
        raise PrivateTextRefusal(
            f"the run's first step has not written these files down as {source.dataset}",
            where=source.field,
            fix="If they have changed since, give them a new data_version.",
        )
    return digest


def _remember(digest: str, source: Source, ledger: Ledger) -> None:
    """Remember whose text a private source is; warn where others' budgets are for it, too."""
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
        # The same words whether or not it is known as private: a guess of a text is not confirmed.
        raise BadInput(
            f"nobody has declared public what is at {source.uri}",
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
    """Copy a file or folder, all of it, under its own name."""
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
