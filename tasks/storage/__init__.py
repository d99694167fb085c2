"""The store: local folders and `gs://` behind one interface."""

from tasks.storage.backends import (
    is_remote,
    keyed_digest,
    local_path,
    read_spec,
    stage_source,
)
from tasks.storage.store import CHECKSUMS, RESULT, Store, StoredCheckpoints, sha256_of

__all__ = [
    "CHECKSUMS",
    "RESULT",
    "Store",
    "StoredCheckpoints",
    "is_remote",
    "keyed_digest",
    "local_path",
    "read_spec",
    "sha256_of",
    "stage_source",
]
