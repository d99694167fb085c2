"""Sources: which files the operator declared public, and which were read as a private data set.

A source is a file or folder that data are read from. It is known by a keyed digest of its content
and never by its place: a copy, a link and another name are the same source, a changed file is
another. The key is the deployment's, and not in the ledger: nobody confirms a guess of a text here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import Connection, delete, insert, select

from dp_core.errors import BadInput
from dp_core.privacy.ledger import rows
from dp_core.privacy.ledger.database import Database
from dp_core.privacy.ledger.schema import DATASETS, PRIVATE_SOURCES, PUBLIC_SOURCES

LONGEST_LABEL = 200
_MARK = 8  # characters of a digest by which people name it


@dataclass(frozen=True)
class PublicSource:
    """A file or folder that the operator declared public.

    Attributes:
        digest: keyed, of its content, in hex.
        label: what people call it; nothing depends on it.
        known_private: declared in the knowledge that it had been read as private.
        private_in: data sets that it was read as.
    """

    digest: str
    label: str
    declared_at: str
    known_private: bool
    private_in: tuple[str, ...]

    @property
    def mark(self) -> str:
        """Return the beginning of the digest, by which people name it."""
        return self.digest[:_MARK]

    @property
    def holds(self) -> bool:
        """Whether the declaration counts: not if it was made before anybody read it as private."""
        return self.known_private or not self.private_in


class Sources:
    """What the ledger knows of sources."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def declare_public(
        self,
        digest: str,
        label: str,
        *,
        contents: Collection[str] = (),
        known_private: bool = False,
    ) -> PublicSource:
        """Declare a source public; to repeat it renews its label. Only the operator may say so.

        Args:
            digest: keyed digest of the file or folder.
            label: for people.
            contents: digests of a folder's files, each for itself.
            known_private: that it was read as private is known, and it is public all the same.

        Raises:
            BadInput: it, or a file of it, was read as a private data set, which is not known.
        """
        with self._database.alone() as db:
            asked = {digest, *contents}
            known = db.execute(select(PRIVATE_SOURCES.c.digest, PRIVATE_SOURCES.c.dataset))
            private = sorted({row.dataset for row in known if row.digest in asked})
            if private and not known_private:
                raise BadInput(
                    f"it was read as private text of {', '.join(private)}",
                    where=f"declare-public {label}",
                    fix="If it is public all the same: --known-private.",
                )
            db.execute(delete(PUBLIC_SOURCES).where(PUBLIC_SOURCES.c.digest == digest))
            values = {
                "digest": digest,
                "label": label[:LONGEST_LABEL],
                "declared_at": rows.now(),
                "known_private": known_private,
            }
            db.execute(insert(PUBLIC_SOURCES).values(values))
            return next(s for s in _public(db) if s.digest == digest)

    def withdraw_public(self, mark: str) -> PublicSource:
        """Take a declaration back: from now on no step reads the source as public.

        What was made of it stays. Declared again, it is public again.

        Args:
            mark: the beginning of its digest.

        Raises:
            BadInput: no declaration, or several, begin so.
        """
        with self._database.alone() as db:
            found = [s for s in _public(db) if len(mark) >= _MARK and s.digest.startswith(mark)]
            if len(found) != 1:
                raise BadInput(
                    f"{len(found) or 'no'} declarations begin with {mark!r}",
                    where="withdraw-public",
                    fix=f"Give at least {_MARK} characters, as confide ledger shows them.",
                )
            db.execute(delete(PUBLIC_SOURCES).where(PUBLIC_SOURCES.c.digest == found[0].digest))
            return found[0]

    def public(self) -> list[PublicSource]:
        """Return every declared source, in the order of declaration."""
        with self._database.transaction() as db:
            return _public(db)

    def declaration(self, digest: str) -> PublicSource | None:
        """Return the declaration of a source, or None: nobody has declared it public."""
        return next((source for source in self.public() if source.digest == digest), None)

    def read_as_private(self, digest: str, dataset: str) -> tuple[str, ...]:
        """Remember that a source is text of a private data set.

        Returns:
            The data sets whose text it is too, and which do not share the budget of this one.

        Raises:
            BadInput: the data set is not registered.
        """
        with self._database.alone() as db:
            rows.budget_of(db, dataset)
            if dataset not in _private_in(db, digest):
                values = {"digest": digest, "dataset": dataset, "read_at": rows.now()}
                db.execute(insert(PRIVATE_SOURCES).values(values))
            return _others(db, [digest], dataset)

    def is_text_of(self, digest: str, dataset: str) -> bool:
        """Whether a source is remembered as text of a private data set."""
        with self._database.transaction() as db:
            return dataset in _private_in(db, digest)

    def same_files_as(self, dataset: str) -> tuple[str, ...]:
        """Return the data sets that read a same source and do not share this one's budget."""
        with self._database.transaction() as db:
            own = select(PRIVATE_SOURCES.c.digest).where(PRIVATE_SOURCES.c.dataset == dataset)
            return _others(db, list(db.scalars(own)), dataset)


def _public(db: Connection) -> list[PublicSource]:
    query = select(PUBLIC_SOURCES).order_by(PUBLIC_SOURCES.c.declared_at, PUBLIC_SOURCES.c.digest)
    return [
        PublicSource(
            digest=row.digest,
            label=row.label,
            declared_at=row.declared_at,
            known_private=row.known_private,
            private_in=_private_in(db, row.digest),
        )
        for row in db.execute(query)
    ]


def _private_in(db: Connection, digest: str) -> tuple[str, ...]:
    query = select(PRIVATE_SOURCES.c.dataset).where(PRIVATE_SOURCES.c.digest == digest)
    return tuple(db.scalars(query.order_by(PRIVATE_SOURCES.c.dataset)))


def _others(db: Connection, digests: list[str], dataset: str) -> tuple[str, ...]:
    budget = select(DATASETS.c.budget_id).where(DATASETS.c.name == dataset).scalar_subquery()
    query = (
        select(PRIVATE_SOURCES.c.dataset)
        .join(DATASETS, DATASETS.c.name == PRIVATE_SOURCES.c.dataset)
        .where(PRIVATE_SOURCES.c.digest.in_(digests), DATASETS.c.budget_id != budget)
        .distinct()
        .order_by(PRIVATE_SOURCES.c.dataset)
    )
    return tuple(db.scalars(query))
