"""Outputs of steps as a job leaves them, for tests that begin in the middle of a job."""

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dp_core.audit.protocol import Finding
from dp_core.config.release import ReleaseRecord
from dp_core.data.token_store import TokenStoreWriter
from dp_core.privacy.seed_store import SeedStore
from dp_core.vocabulary import tokenizer_files, wordpiece
from tasks.protocol.messages import MetricRecord, StepResult
from tasks.results import FINDINGS, read_findings, write_findings
from tasks.runtime.deployment import Deployment
from tasks.storage.backends import local_path
from tasks.storage.store import RESULT, Store

POSITIONS = 8


def output_folder(deployment: Deployment, uri: str) -> Path:
    return local_path(deployment.open_store().location(uri))


def vocabulary_in(*folders: Path) -> int:
    tokenizer = wordpiece.learn({"pain": 90, "in": 80, "arm": 70}, 40)
    for folder in folders:
        folder.mkdir(parents=True)
        tokenizer_files.save(tokenizer, folder)
    return tokenizer.get_vocab_size()


def rows_in(deployment: Deployment, folder: Path, size: int, *parts: str) -> str:
    """Write the same rows of 30 units to each part; return their keyed digest."""
    for part in parts:
        writer = TokenStoreWriter(folder / part, POSITIONS, size)
        for unit in range(30):
            writer.add_unit(str(unit), [[2, 5 + unit % 7, 6 + unit % 5, 7, 3]])
        content = writer.finish().content_digest()
    key = SeedStore(deployment.keys).create("content-digests").derive("content-digest")
    return hmac.new(key, content.encode(), hashlib.sha256).hexdigest()


def findings_at(folder: Path, key: str) -> list[Finding]:
    names = [name for name in FINDINGS.values() if (folder / f"{name}.json").exists()]
    result = StepResult(
        step="", spec_hash="", outputs={name: name for name in names}, metrics=[], facts={},
        releases=[],
    )  # fmt: skip
    return [finding for finding in read_findings(result, folder) if finding.key == key]


def publish_findings(
    store: Store, uri: str, folder: Path, findings: Sequence[Finding], **facts: Any
) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    outputs = [Path(file).stem for file in write_findings(folder, findings)]
    return publish(store, uri, folder, outputs=outputs, **facts)


def publish(
    store: Store,
    uri: str,
    folder: Path | None = None,
    *,
    releases: Sequence[ReleaseRecord] = (),
    outputs: Sequence[str] = (),
    metrics: Sequence[MetricRecord] = (),
    **facts: Any,
) -> str:
    """Publish a folder, if any, and a result as the output of the step that the URI names."""
    if folder is not None:
        store.publish(folder, uri)
    step = uri.split("/")[-2]
    result = StepResult(
        step=step, spec_hash="a" * 64, outputs={name: f"{uri}/{name}" for name in outputs},
        metrics=list(metrics), facts=facts, releases=list(releases),
    )  # fmt: skip
    store.write(f"{uri}/{RESULT}", result.model_dump_json().encode())
    return uri
