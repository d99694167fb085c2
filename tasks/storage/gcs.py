"""Objects in a Google Cloud Storage bucket, or in an emulator at `STORAGE_EMULATOR_HOST`."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from dp_core.errors import BadInput
from tasks.storage.local import Missing

CHUNK = 16 << 20  # bytes; uploads larger than this are sent in parts
RANGE = 32 << 20  # bytes; larger objects are read in parallel in ranges of this size
CONNECTIONS = 4
PATIENCE = 300.0  # seconds; an emulator answers the last part only after reading the whole object


def _client() -> Any:
    with warnings.catch_warnings():
        # In every process, the client warns of the end of Python 3.11 and of optional packages.
        warnings.simplefilter("ignore")
        from google.auth.credentials import AnonymousCredentials
        from google.auth.exceptions import DefaultCredentialsError
        from google.cloud import storage

    if os.environ.get("STORAGE_EMULATOR_HOST"):
        return storage.Client(project="confide", credentials=AnonymousCredentials())  # type: ignore[no-untyped-call]
    try:
        return storage.Client()  # credentials by the standard ways only
    except DefaultCredentialsError:
        raise BadInput(
            "no Google credentials",
            where="storage",
            fix="Run as a service account (Workload Identity), set GOOGLE_APPLICATION_CREDENTIALS, "
            "or log in with `gcloud auth application-default login`.",
        ) from None


class GoogleStorageBackend:
    """The objects of a bucket whose names begin with a prefix.

    An object appears in Cloud Storage only when its upload is complete, and the client compares
    a checksum of every upload and download.
    """

    def __init__(self, bucket: str, prefix: str) -> None:
        self.prefix = prefix.strip("/")
        self._bucket = _client().bucket(bucket)

    def _name(self, key: str) -> str:
        parts = key.split("/")
        if ".." in parts:
            raise BadInput("a path leaves the store", where="storage", fix="Use paths below it.")
        return "/".join(part for part in [self.prefix, *parts] if part not in ("", "."))

    def read(self, key: str) -> bytes:
        """Return the object's content."""
        from google.cloud.exceptions import NotFound

        try:
            content: bytes = self._bucket.blob(self._name(key)).download_as_bytes()
        except NotFound as error:
            raise Missing(key) from error
        return content

    def write(self, key: str, content: bytes) -> None:
        """Upload the content in one request."""
        blob = self._bucket.blob(self._name(key))
        blob.upload_from_string(content, content_type="application/octet-stream", checksum="crc32c")

    def get(self, key: str, destination: Path, size: int | None = None) -> None:
        """Download the object as a stream; a large one in ranges, all of the same generation."""
        from google.cloud.exceptions import NotFound

        blob = self._bucket.blob(self._name(key))
        try:
            if size is None:
                blob.reload()
                size = int(blob.size)
            if size > RANGE:
                self._get_ranges(blob, destination)
            else:
                blob.download_to_filename(str(destination), checksum="crc32c")
        except NotFound as error:
            destination.unlink(missing_ok=True)
            raise Missing(key) from error

    def _get_ranges(self, blob: Any, destination: Path) -> None:
        from google.cloud.storage import transfer_manager

        blob.reload()  # its size, checksum and generation must match
        transfer_manager.download_chunks_concurrently(
            blob,
            str(destination),
            chunk_size=RANGE,
            download_kwargs={"if_generation_match": blob.generation},
            worker_type=transfer_manager.THREAD,  # a process would get the credentials pickled
            max_workers=CONNECTIONS,
        )

    def put(self, source: Path, key: str) -> None:
        """Upload the file, in parts if it is large."""
        large = source.stat().st_size > CHUNK
        blob = self._bucket.blob(self._name(key), chunk_size=CHUNK if large else None)
        blob.upload_from_filename(str(source), checksum="crc32c", timeout=PATIENCE)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the sizes of the objects below a folder, by key."""
        start = f"{self.prefix}/" if self.prefix else ""
        folder = self._name(prefix)
        blobs = self._bucket.list_blobs(prefix=f"{folder}/" if folder else "")
        return {blob.name.removeprefix(start): int(blob.size) for blob in blobs}

    def delete(self, key: str) -> None:
        """Remove the object."""
        from google.cloud.exceptions import NotFound

        try:
            self._bucket.blob(self._name(key)).delete()
        except NotFound:
            return
