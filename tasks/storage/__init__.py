"""Local folders and `gs://` behind one door; the backends stay inside."""

from tasks.storage.checkpoints import StoredCheckpoints
from tasks.storage.sources import keyed_digest, read_spec, stage_source
from tasks.storage.store import CHECKSUMS, RESULT, Store, sha256_of
from tasks.storage.uris import encode_data, is_remote, local_path

__all__ = [
    "CHECKSUMS",
    "RESULT",
    "Store",
    "StoredCheckpoints",
    "encode_data",
    "is_remote",
    "keyed_digest",
    "local_path",
    "read_spec",
    "sha256_of",
    "stage_source",
]
