"""Sources: which files the operator declared public, and which were read as a private data set.

A source is a file or folder that data are read from. It is known by a keyed digest of its content
and never by its path: a copy, a link and another name are the same source, a changed file is
another. The key is the deployment's, and not in the ledger: nobody confirms a guess of a text here.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Select, select
from sqlalchemy.orm import Session, aliased

from dp_core.errors import BadInput
from dp_core.privacy.ledger.database import Database
from dp_core.privacy.ledger.models import Budget, Dataset, PrivateSource, PublicSource

LONGEST_LABEL = 200


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
            known = db.execute(select(PrivateSource.digest, PrivateSource.dataset))
            private = sorted({row.dataset for row in known if row.digest in asked})
            if private and not known_private:
                raise BadInput(
                    f"it was read as private text of {', '.join(private)}",
                    where=f"declare-public {label}",
                    fix="If it is public all the same: --known-private.",
                )
            db.merge(
                PublicSource(
                    digest=digest, label=label[:LONGEST_LABEL], known_private=known_private
                )
            )
            db.flush()
            return db.scalars(_public().where(PublicSource.digest == digest)).one()

    def withdraw_public(self, mark: str) -> PublicSource:
        """Take a declaration back: from now on no step reads the source as public.

        What was made of it stays. Declared again, it is public again.

        Args:
            mark: the beginning of its digest.

        Raises:
            BadInput: no declaration, or several, begin so.
        """
        with self._database.alone() as db:
            named = [
                source
                for source in db.scalars(_public())
                if len(mark) >= len(source.mark) and source.digest.startswith(mark)
            ]
            if len(named) != 1:
                raise BadInput(
                    f"{len(named) or 'no'} declarations begin with {mark!r}",
                    where="withdraw-public",
                    fix="Give at least 8 characters, as confide ledger shows them.",
                )
            db.delete(named[0])
            return named[0]

    def public(self) -> list[PublicSource]:
        """Return every declared source, in the order of declaration."""
        with self._database.transaction() as db:
            return list(db.scalars(_public()))

    def declaration(self, digest: str) -> PublicSource | None:
        """Return the declaration of a source, or None: nobody has declared it public."""
        with self._database.transaction() as db:
            return db.get(PublicSource, digest)

    def read_as_private(self, digest: str, dataset: str) -> tuple[str, ...]:
        """Remember that a source is text of a private data set.

        Returns:
            The data sets whose text it is too, and which do not share the budget of this one.

        Raises:
            BadInput: the data set is not registered.
        """
        with self._database.alone() as db:
            Budget.of_dataset(db, dataset)
            if db.get(PrivateSource, (digest, dataset)) is None:
                db.add(PrivateSource(digest=digest, dataset=dataset))
            return _others(db, [digest], dataset)

    def is_text_of(self, digest: str, dataset: str) -> bool:
        """Whether a source is remembered as text of a private data set."""
        with self._database.transaction() as db:
            return db.get(PrivateSource, (digest, dataset)) is not None

    def same_files_as(self, dataset: str) -> tuple[str, ...]:
        """Return the data sets that read a same source and do not share this one's budget."""
        with self._database.transaction() as db:
            read = select(PrivateSource.digest).where(PrivateSource.dataset == dataset)
            return _others(db, list(db.scalars(read)), dataset)


def _public() -> Select[PublicSource]:
    return select(PublicSource).order_by(PublicSource.declared_at, PublicSource.digest)


def _others(db: Session, digests: list[str], dataset: str) -> tuple[str, ...]:
    this = aliased(Dataset)
    query = (
        select(PrivateSource.dataset)
        .join(Dataset, Dataset.name == PrivateSource.dataset)
        .join(this, this.name == dataset)
        .where(PrivateSource.digest.in_(digests), Dataset.budget_id != this.budget_id)
        .distinct()
        .order_by(PrivateSource.dataset)
    )
    return tuple(db.scalars(query))
