"""Sources: files that the operator declared public, and files that were read as private data.

A source is a file or folder that data are read from. The ledger identifies it by a keyed digest of
its content and never by its path: a copy, a link and a renamed file are the same source, a changed
file is another one. The key belongs to the deployment and is not in the ledger, so a reader of the
ledger cannot confirm a guessed text.
"""

from collections.abc import Collection

from sqlalchemy import ForeignKey, Select, select
from sqlalchemy.orm import Mapped, Session, foreign, mapped_column, relationship, remote

from dp_core.errors import BadInput
from dp_core.privacy.ledger.database import Database
from dp_core.privacy.ledger.models import Base, Budget, Dataset, now

LONGEST_LABEL = 200
_DIGEST_START = 8  # leading characters of a digest that identify a source on the command line


class PrivateSource(Base, kw_only=True):
    """A file or folder that was read as text of a private data set, with the first time."""

    __tablename__ = "private_sources"

    digest: Mapped[str] = mapped_column(primary_key=True)
    dataset: Mapped[str] = mapped_column(ForeignKey(Dataset.name), primary_key=True)
    read_at: Mapped[str] = mapped_column(default_factory=now)


class PublicSource(Base, kw_only=True):
    """A file or folder that the operator declared public.

    Attributes:
        digest: keyed digest of its content, in hex.
        label: a name for people, without effect.
        known_private: the operator declared it although it had been read as private.
    """

    __tablename__ = "public_sources"

    digest: Mapped[str] = mapped_column(primary_key=True)
    label: Mapped[str]
    declared_at: Mapped[str] = mapped_column(default_factory=now)
    known_private: Mapped[bool]
    _readings: Mapped[list[PrivateSource]] = relationship(
        primaryjoin=lambda: PublicSource.digest == foreign(remote(PrivateSource.digest)),
        order_by=PrivateSource.dataset,
        viewonly=True,
        lazy="selectin",
        init=False,
    )

    @property
    def private_in(self) -> tuple[str, ...]:
        """The private data sets whose text it was read as."""
        return tuple(reading.dataset for reading in self._readings)

    @property
    def mark(self) -> str:
        """The beginning of the digest, which identifies the source on the command line."""
        return self.digest[:_DIGEST_START]

    @property
    def holds(self) -> bool:
        """Whether the declaration is valid: a later private reading makes it invalid."""
        return self.known_private or not self.private_in


class Sources:
    """The ledger's records of public and private sources."""

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
        """Declare a source public, on the operator's word; a repeated declaration renews the label.

        Args:
            digest: keyed digest of the file or folder.
            label: for people.
            contents: the digest of each file of a folder.
            known_private: the operator knows that the source was read as private, and declares
                it public nevertheless.

        Raises:
            BadInput: the source or one of its files was read as private, and `known_private` is
                not set.
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
        """Withdraw a declaration: from now on no step reads the source as public.

        Existing outputs stay. The source may be declared public again later.

        Args:
            mark: the beginning of its digest.

        Raises:
            BadInput: no declaration, or more than one, begins with `mark`.
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
        """Return the declaration of a source, or None if it was not declared public."""
        with self._database.transaction() as db:
            return db.get(PublicSource, digest)

    def read_as_private(self, digest: str, dataset: str) -> tuple[str, ...]:
        """Remember that a source is text of a private data set.

        Returns:
            The other data sets that read the same source under a different budget.

        Raises:
            BadInput: the data set is not registered.
        """
        with self._database.alone() as db:
            Budget.of_dataset(db, dataset)
            if db.get(PrivateSource, (digest, dataset)) is None:
                db.add(PrivateSource(digest=digest, dataset=dataset))
            return _others(db, [digest], dataset)

    def is_text_of(self, digest: str, dataset: str) -> bool:
        """Return whether a source was read as text of this private data set."""
        with self._database.transaction() as db:
            return db.get(PrivateSource, (digest, dataset)) is not None

    def same_files_as(self, dataset: str) -> tuple[str, ...]:
        """Return the data sets that read the same source under a different budget."""
        with self._database.transaction() as db:
            read = select(PrivateSource.digest).where(PrivateSource.dataset == dataset)
            return _others(db, list(db.scalars(read)), dataset)


def _public() -> Select[PublicSource]:
    return select(PublicSource).order_by(PublicSource.declared_at, PublicSource.digest)


def _others(db: Session, digests: list[str], dataset: str) -> tuple[str, ...]:
    budget = select(Dataset.budget_id).where(Dataset.name == dataset).scalar_subquery()
    query = (
        select(PrivateSource.dataset)
        .join(Dataset)
        .where(PrivateSource.digest.in_(digests), Dataset.budget_id != budget)
        .distinct()
        .order_by(PrivateSource.dataset)
    )
    return tuple(db.scalars(query))
