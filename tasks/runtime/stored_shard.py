"""Shards in a bucket, opened by any process on this or another machine."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from dp_core.data.corpus import Shard
from tasks.runtime.deployment import Deployment
from tasks.storage import Store
from tasks.storage.copies import UNUSED
from tasks.storage.journal import exclusive

CACHE_LIMIT = 4 << 30  # bytes of shards on one machine; phrases read them once a round


@dataclass(frozen=True, slots=True)
class StoredShard(Shard):
    """A shard in the store's bucket, opened through the cache of the current machine.

    The machine's own environment gives the cache and the bucket's credentials; neither is part of
    the shard.
    """

    def open(self) -> BufferedReader:
        """Open a local copy, downloading it first if there is none.

        Raises:
            FileNotFoundError: the bucket has no such object.
            OSError: the bucket does not answer, or the disk is full.
        """
        folder, _, name = self.uri.rpartition("/")
        deployment = Deployment.from_environment()
        cache = deployment.cache / "shards"
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        copy = cache / f"{self.sha256}.shard"
        with exclusive(copy.with_suffix(".lock")):
            while True:
                with suppress(FileNotFoundError):
                    opened = copy.open("rb")  # readable even if it is removed from here on
                    os.utime(opened.fileno())
                    return opened
                partial = copy.with_suffix(".partial")
                Store(folder, cache).get(f"{folder}/{name}", partial)
                partial.rename(copy)
                remove_oldest(
                    cache, min(CACHE_LIMIT, deployment.cache_bytes or CACHE_LIMIT), but=copy
                )


def remove_oldest(cache: Path, limit: int, *, but: Path) -> None:
    """Remove the least recently used copies until the others fit the limit (bytes).

    Copies that were not used for a week are removed in any case, as in the rest of the cache.

    Args:
        cache: the folder.
        limit: bound on the total size of the copies.
        but: a copy that is kept, whatever its size.
    """
    found, kept = [], but.stat().st_size
    for file in cache.glob("*.shard"):
        with suppress(FileNotFoundError):  # another process has removed it
            found.append((file.stat(), file))
    for status, file in sorted(found, key=lambda one: one[0].st_mtime_ns, reverse=True):
        kept += status.st_size if file != but else 0
        old = time.time() - status.st_mtime > UNUSED
        if (kept > limit or old) and file != but:
            file.unlink(missing_ok=True)
