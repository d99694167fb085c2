"""The context of a step: its inputs, a folder for its outputs, and its event log."""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

from dp_core.cluster.ray_cluster import open_cluster
from dp_core.cluster.shard_map import ShardMap
from dp_core.config.release import ReleaseRecord
from dp_core.data.corpus import Shard, is_corpus, is_shard, shards_of
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.errors import BadInput
from dp_core.labels import Dp, Label, Labelled, Operator, Public
from dp_core.privacy.seed_store import SeedStore
from dp_core.privacy.statement import DatasetTotal, totals
from dp_core.training.checkpoints import CheckpointPlace, LocalFolder
from dp_core.vocabulary.item_sets import GatheredSets
from tasks.protocol.least_privilege import for_workers
from tasks.protocol.messages import MetricRecord, StepResult
from tasks.protocol.specs import STORE_SCHEME, RunContext
from tasks.results import Input, merged, read_result
from tasks.runtime.deployment import Deployment
from tasks.runtime.log import StepProgressReporter
from tasks.storage.backends import is_remote, keyed_digest
from tasks.storage.copies import Copies
from tasks.storage.store import CHECKSUMS, RESULT, Store, StoredCheckpoints
from tasks.tracking.event_log import INFINITE
from tasks.tracking.tracker import Tracker

SHARD = "shard.parquet"  # the file in a shard's copy
SHARD_BYTES = 4 << 30  # bytes of shards on one machine; phrases read them once a round
_LEFT_OUT, _PASSED_OVER = "_quarantined", "_passed_over"  # endings of the metrics' names
_FIX = "`iconv -f WINDOWS-1252 -t UTF-8` converts text of older Windows systems"

Content = TypeVar("Content")


@dataclass(frozen=True)
class StepOutput:
    """The output of a step whose output folder is complete.

    Attributes:
        outputs: name -> path inside the output folder; '' is the folder.
        facts: small facts, fit for publication.
        artifacts: files that the tracker shows to people, each with its label.
        model: name under which the job's last step registers the output, after its audits have been
            read; '' for none.
    """

    outputs: dict[str, str]
    facts: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, Label] = field(default_factory=dict)
    model: str = ""


def content_key(deployment: Deployment, purpose: str = "content-digest") -> bytes:
    """Return a secret for keyed digests, the same for all steps of the deployment.

    The secret hides the digested content, and no noise depends on it. It is kept apart from the
    seeds, so that steps without access to the seeds can have it.
    """
    return SeedStore(deployment.keys).create("content-digests").derive(purpose)


@dataclass(frozen=True, slots=True)
class StoredShard(Shard):
    """A shard in the store's bucket, opened through the cache of the current machine.

    The machine's own environment gives the cache and the bucket's credentials; neither is part of
    the shard.

    Attributes:
        size: size of the file in bytes.
    """

    size: int

    def open(self) -> BufferedReader:
        """Open a local copy, downloading it first if there is none.

        Raises:
            FileNotFoundError: the bucket has no such object.
            OSError: the bucket does not answer, or the disk is full.
        """
        deployment = Deployment.from_environment()
        store = Store(self.uri.rpartition("/")[0], deployment.cache)
        copies = Copies(
            deployment.cache / "shards", min(SHARD_BYTES, deployment.cache_bytes or SHARD_BYTES)
        )

        def fill(copy: Path) -> None:
            store.get(self.uri, copy / SHARD)

        # Shards of equal content, such as two without documents, share one copy.
        with copies.held(self.sha256, self.size, fill) as copy:
            return (copy / SHARD).open("rb")  # readable even if the copy is removed from here on


def read_checked(file: Path, parse: Callable[[bytes], Content], noun: str, step: str) -> Content:
    """Return the content of a file that an earlier step wrote.

    Raises:
        BadInput: the file has changed since it was written.
    """
    try:
        return parse(file.read_bytes())
    except (OSError, ValueError, TypeError):
        # `from None`: the cause may quote the file, which may be private
        raise BadInput(
            f"the {noun} are damaged", where=str(file), fix=f"Run the {step} step again."
        ) from None


@dataclass(kw_only=True, eq=False, repr=False)
class StepContext:
    """The environment of one step: inputs, output folder, measurements and cost.

    Attributes:
        run: the run that the step is part of.
        durable: local folder that survives a retry, for checkpoints.
        spec_hash: hash of the step's spec.
        made_up: whether every input is made up or public.
        releases: all releases of private data that the output descends from: the releases of each
            opened input, and the step's own. They are always part of the result.
        source_digests: keyed digest of each source file that the step has opened, by its setting.
    """

    deployment: Deployment
    store: Store
    run: RunContext
    spec_hash: str
    made_up: bool
    durable: Path
    tracker: Tracker
    progress: StepProgressReporter
    releases: list[ReleaseRecord] = field(default_factory=list, init=False)
    source_digests: dict[str, str] = field(default_factory=dict, init=False)

    @property
    def out(self) -> Path:
        """Empty local folder; the files that the step leaves in it are published."""
        return self.durable / "out"

    def descends_from(self, *releases: ReleaseRecord) -> None:
        """Record that the output descends from these releases."""
        self.releases = merged([*self.releases, *releases])

    def input(self, uri: str) -> Input:
        """Return an earlier step's output; this step's output then descends from its releases.

        Shards of a corpus are neither downloaded nor checked: `shards` locates them, and the
        process that reads a shard checks its digest.

        Raises:
            BadInput: the output is missing, or it is private and this step's spec states otherwise.
        """
        opened = self.beside(uri)
        self.descends_from(*opened.result.releases)
        return opened

    def beside(self, uri: str) -> Input:
        """Return an earlier step's output without counting its releases.

        Nothing publishable may be computed from it. A report shows it to the operator, by the
        labels of its numbers, and the publishable part of the report does not descend from it.

        Raises:
            BadInput: as in `input`.
        """
        result = self._result(uri, "Run the step that makes it first.")
        if self.made_up and not result.facts.get("made_up", False):
            raise BadInput(
                "an input is private, but the spec calls everything made up",
                where=uri,
                fix="Set made_up to false.",
            )
        return Input(result, self.store.local_copy(uri, without=is_shard), uri)

    def descends_from_choice(self, uris: Iterable[str]) -> None:
        """Count the releases by which a step's settings were chosen as part of its output's cost.

        Args:
            uris: outputs whose numbers were reported to an optimiser.

        Raises:
            BadInput: an output is missing.
        """
        for uri in uris:
            self.descends_from(*self._result(uri, "Run the sweep from its beginning.").releases)

    def _result(self, uri: str, fix: str) -> StepResult:
        result = read_result(self.store, uri)
        if result is None:
            raise BadInput("no result there", where=uri, fix=fix)
        return result

    def refuse_altered(self, source: Input) -> None:
        """Refuse an input whose files have changed since its step wrote them.

        The noise of a release is bound to the content of its inputs.

        Raises:
            BadInput: the files have changed.
        """
        if self.content_digest(source.folder) != source.facts["digest"]:
            raise BadInput(
                "the files are not those that the step wrote",
                where=source.folder.name,
                fix="Delete the folder and run its step again.",
            )

    def content_digest(self, folder: Path) -> str:
        """Return the keyed digest of an output folder's own files.

        A corpus's shards are covered by their digests in the corpus's mark; the process that reads
        a shard checks its digest.
        """
        shards = {shard.name for shard in shards_of(folder)} if is_corpus(folder) else set()
        return keyed_digest(folder, self.content_key(), without={CHECKSUMS, RESULT, *shards})

    @cached_property
    def cluster(self) -> ShardMap:
        """Return the deployment's cluster for functions of shards; results do not depend on it."""
        return open_cluster(
            self.deployment.cluster,
            secrets=self.deployment.cluster_secrets,
            environment=for_workers(os.environ),
            packages=("dp_core", "tasks"),
        )

    def close(self) -> None:
        """Close the step's other processes: a pool or a connection to a cluster."""
        if close := getattr(self.__dict__.get("cluster"), "close", None):
            close()

    def shards(self, corpus: Input) -> list[Shard]:
        """Return the shards of a corpus, in a form that any worker can open.

        If the store is a bucket, each worker downloads a shard when it opens it. If the store is a
        folder, all machines of a cluster must see it at the same path.
        """
        shards = shards_of(corpus.folder)
        if not is_remote(self.store.root):
            return shards
        uri, sizes = self.store.location(corpus.uri), self.store.sizes(corpus.uri)
        return [StoredShard(f"{uri}/{s.name}", s.sha256, sizes[s.name]) for s in shards]

    def gathered_sets(self) -> GatheredSets:
        """Return storage for sets of items, which uses the work folder if there are too many."""
        return GatheredSets(self.durable / "item-sets")

    def checkpoints(self, name: str) -> CheckpointPlace:
        """Return the place where a training keeps its checkpoints until the step is done.

        Checkpoints are next to the other unfinished work of this machine. If the store is remote,
        they are in the store, because another machine may make the next attempt.
        """
        if is_remote(self.store.root):
            return StoredCheckpoints(
                self.store, f"{self._unfinished}/{name}", self.durable / "checkpoint"
            )
        return LocalFolder(self.durable / name)

    def clear(self) -> None:
        """Remove the files that only an unfinished step needs."""
        if is_remote(self.store.root):
            self.store.clear(self._unfinished)
        shutil.rmtree(self.durable, ignore_errors=True)

    @property
    def _unfinished(self) -> str:
        return f"{STORE_SCHEME}unfinished/{self.durable.name}"

    def measure(self, name: str, value: Labelled, step: int = 0) -> None:
        """Record a number in the event log, from which the result and MLflow's run are made.

        If the output descends from a vocabulary of exact private counts or from a study, every
        number is the operator's, whatever its label: even accuracy on public text, and the number
        of rows that this text was cut into.

        Raises:
            TypeError: the number has no label.
        """
        if self.for_operator_alone and isinstance(value, Dp | Public):
            value = Operator(value.value)
        self.tracker.measure(name, value, step)

    def measure_cost(self, releases: Sequence[ReleaseRecord]) -> None:
        """Record the total cost of releases as `epsilon` and `delta`; both are 0 without releases.

        The number of releases is the metric's step: a run in MLflow gets the totals of a model's
        pre-training and of its fine-tuning, and the total of more releases is then the last.

        Data sets with different budgets hold different people, and neither the sum nor the maximum
        of their totals is a guarantee for any person. Each budget therefore has separate metrics,
        `epsilon/NAME` and `delta/NAME`; the metrics without a name are those for the first budget,
        which paid for the vocabulary. NAME is that of its data sets.

        An infinite or missing total is recorded as a tag in words, and as the largest finite
        number, which replaces the smaller total of an earlier step of the model in MLflow. An
        infinite ε has the label `operator`.
        """
        step = len(releases)
        parts = totals(releases) or (DatasetTotal((), None, 0.0, 0.0),)
        named = [(f"/{total.dataset}", total) for total in parts if len(parts) > 1]
        for name, total in (("", parts[0]), *named):
            if total.epsilon is None or math.isinf(total.epsilon):
                words = "no total: unlike units or neighbours" if total.epsilon is None else "inf"
                self.tracker.tag(f"epsilon{name}", words)
                label = Public if total.epsilon is None else Operator
                self.measure(f"epsilon{name}", label(INFINITE), step)
            else:
                self.measure(f"epsilon{name}", Public(total.epsilon), step)
                self.measure(f"delta{name}", Public(total.delta), step)

    def measure_omissions(
        self, items: str, quarantine: Quarantine, label: Callable[[float], Labelled]
    ) -> None:
        """Record the numbers of items that a reader left out of a source, in total and by reason.

        Args:
            items: name of the source's items, for example `documents`.
            quarantine: the reader's counts of left out items.
            label: `Operator` if the source is private.
        """
        self.measure(f"{items}{_LEFT_OUT}", label(quarantine.rejected))
        for reason, number in quarantine.counts.items():
            self.measure(f"{items}{_LEFT_OUT}/{reason.name.lower()}", label(number))
        if quarantine.passed_over:
            self.measure(f"{items}{_PASSED_OVER}", label(quarantine.passed_over))

    @property
    def for_operator_alone(self) -> bool:
        """Whether the output descends from a vocabulary of exact private counts, or a study."""
        return any(release.for_operator_alone for release in self.releases)

    def measured(self) -> list[MetricRecord]:
        """Return every number of this step, including the attempts that this one continues."""
        return self.tracker.events.metrics()

    @property
    def seeds(self) -> SeedStore:
        """Return the operator's store of secret seeds."""
        return SeedStore(self.deployment.seeds)

    def content_key(self) -> bytes:
        """Return the secret key of content digests; without it no guess can be confirmed."""
        return content_key(self.deployment)

    def keyed(self, digest: str) -> str:
        """Return a digest under the secret key, in hex."""
        return hmac.new(self.content_key(), digest.encode(), hashlib.sha256).hexdigest()


def omissions_of(result: StepResult) -> tuple[str, Label] | None:
    """Return one line on all items that a step left out, with its label, or None without any.

    Counts of private text appear only in the operator's edition of a report and on the terminal.
    """
    parts: list[str] = []
    fix, label = "", Label.PUBLIC
    counts = {m.name: m for m in result.metrics if m.value}
    for name, metric in sorted(counts.items()):
        if name.endswith(_LEFT_OUT):
            items = name.removesuffix(_LEFT_OUT).replace("_", " ")
            reasons = {r: counts.get(f"{name}/{r.name.lower()}") for r in Reason}
            by_reason = ", ".join(f"{r}: {m.value:.0f}" for r, m in reasons.items() if m)
            parts.append(f"{items} left out: {metric.value:.0f} ({by_reason})")
            fix = fix or (_FIX if reasons[Reason.ENCODING] else "")
        elif name.endswith(_PASSED_OVER):
            parts.append(f"files of other formats passed over: {metric.value:.0f}")
        else:
            continue
        label = Label(metric.label)
    return ("; ".join([*parts, *([fix] if fix else [])]), label) if parts else None
