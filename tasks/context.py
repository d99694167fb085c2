"""The context of a step: its inputs, a folder for its outputs, and its event log."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dp_core.cluster.interfaces import ShardMap
from dp_core.cluster.ray_cluster import open_cluster
from dp_core.data.corpus import Shard, is_corpus, is_shard, shards_of
from dp_core.errors import BadInput
from dp_core.labels import Dp, Label, Labelled, Operator, Public
from dp_core.privacy.seed_store import SeedStore
from dp_core.privacy.statement import DatasetTotal
from dp_core.training.checkpoints import CheckpointPlace, LocalFolder
from dp_core.vocabulary.gathered_sets import GatheredSets
from tasks.protocol import MetricRecord, ReleaseRecord, RunContext
from tasks.protocol.least_privilege import for_workers
from tasks.protocol.specs import STORE_SCHEME
from tasks.results.inputs import Input, merged, read_result
from tasks.results.statements import totals
from tasks.runtime.deployment import Deployment
from tasks.runtime.log import StepProgressReporter
from tasks.runtime.stored_shard import StoredShard
from tasks.storage import CHECKSUMS, RESULT, Store, StoredCheckpoints, is_remote, keyed_digest
from tasks.tracking.tracker import Tracker


@dataclass(frozen=True)
class StepArtifact:
    """A file of the output folder that people look at in the tracker."""

    file: str
    label: Label
    folder: str = ""


@dataclass(frozen=True)
class StepOutput:
    """What a step hands back when its output folder is complete.

    Attributes:
        outputs: name -> path inside the output folder; '' is the folder itself.
        facts: small facts, fit for publication.
        artifacts: files to show in the tracker.
        model: name under which the job's last step registers the output, once its audits are read;
            '' for none.
    """

    outputs: dict[str, str]
    facts: dict[str, Any] = field(default_factory=dict)
    artifacts: list[StepArtifact] = field(default_factory=list)
    model: str = ""


def content_key(deployment: Deployment, purpose: str) -> bytes:
    """Return a secret of the deployment, the same for all its steps, for keyed digests.

    It hides what a digest is of, and no noise hangs on it: it is not among the seeds, so that
    steps can have it who must not have those.
    """
    return SeedStore(deployment.keys).create("content-digests").derive(purpose)


class StepContext:
    """What one step works with.

    Attributes:
        run: which run the step is part of.
        out: empty local folder; what the step leaves in it is published.
        durable: local folder that survives a retry, for checkpoints.
        spec_hash: the step's own hash.
        made_up: every input is made up or public.
        releases: of private data, everything that the output descends from: those of each input
            that was opened, and the step's own. They go into the result whatever the step does.
    """

    def __init__(
        self,
        *,
        deployment: Deployment,
        store: Store,
        run: RunContext,
        spec_hash: str,
        made_up: bool,
        durable: Path,
        tracker: Tracker,
        progress: StepProgressReporter,
    ) -> None:
        self.deployment, self.store, self.run = deployment, store, run
        self.spec_hash, self.made_up, self.durable = spec_hash, made_up, durable
        self.tracker, self.progress = tracker, progress
        self.out = durable / "out"
        self.releases: list[ReleaseRecord] = []

    def descends_from(self, *releases: ReleaseRecord) -> None:
        """Note that the output holds something of these releases."""
        self.releases = merged([*self.releases, *releases])

    def input(self, uri: str) -> Input:
        """Return an earlier step's output; whatever comes of it descends from its releases.

        Shards of a corpus are neither fetched nor checked: `shards` says where they are, and
        whoever reads one holds it to its digest.

        Raises:
            BadInput: it is not there, or it is private and this step's spec says otherwise.
        """
        opened = self.beside(uri)
        self.descends_from(*opened.result.releases)
        return opened

    def beside(self, uri: str) -> Input:
        """Return an output of which nothing publishable is made, as `input` does otherwise.

        A report shows it to the operator, by the labels of its own numbers; what anyone may see
        does not descend from it.

        Raises:
            BadInput: as `input`.
        """
        result = read_result(self.store, uri)
        if result is None:
            raise BadInput("no result there", where=uri, fix="Run the step that makes it first.")
        if self.made_up and not result.facts.get("made_up", False):
            raise BadInput(
                "an input is private, but the spec calls everything made up",
                where=uri,
                fix="Set made_up to false.",
            )
        return Input(result, self.store.local_copy(uri, without=is_shard), uri)

    def descends_from_choice(self, uris: Iterable[str]) -> None:
        """Count what a step's settings were chosen by among what its output has cost.

        Args:
            uris: outputs whose numbers an optimiser was told.

        Raises:
            BadInput: one is not there.
        """
        for uri in uris:
            told = read_result(self.store, uri)
            if told is None:
                raise BadInput(
                    "no result there", where=uri, fix="Run the sweep from its beginning."
                )
            self.descends_from(*told.releases)

    def refuse_altered(self, source: Input) -> None:
        """Check that an input's files are those that its step wrote: the noise is bound to them.

        Raises:
            BadInput: they are not.
        """
        if self.content_digest(source.folder) != source.facts["digest"]:
            raise BadInput(
                "the files are not those that the step wrote",
                where=source.folder.name,
                fix="Delete the folder and run its step again.",
            )

    def content_digest(self, folder: Path) -> str:
        """Return the keyed digest of an output folder's own files.

        Of a corpus's shards by their digests in its mark, to which whoever reads one holds it.
        """
        shards = {shard.name for shard in shards_of(folder)} if is_corpus(folder) else set()
        return keyed_digest(folder, self.content_key(), without={CHECKSUMS, RESULT, *shards})

    @cached_property
    def cluster(self) -> ShardMap:
        """Return the deployment's place for functions of shards; results do not depend on it."""
        return open_cluster(
            self.deployment.cluster,
            secrets=self.deployment.cluster_secrets,
            environment=for_workers(os.environ),
            packages=("dp_core", "tasks"),
        )

    def close(self) -> None:
        """End the other processes of the step: a pool or a connection to a cluster."""
        if close := getattr(self.__dict__.get("cluster"), "close", None):
            close()

    def shards(self, corpus: Input) -> list[Shard]:
        """Return the shards of a corpus, as whoever works on them can open them.

        Where the store is a bucket each comes from there when it is opened, on whichever machine;
        where it is a folder, all machines of a cluster must see it at the same path.
        """
        shards = shards_of(corpus.folder)
        if not is_remote(self.store.root):
            return shards
        uri = self.store.location(corpus.uri)
        return [StoredShard(f"{uri}/{shard.name}", shard.sha256) for shard in shards]

    def gathered_sets(self) -> GatheredSets:
        """Return a place for sets of items, in the work folder where they are too many."""
        return GatheredSets(self.durable / "item-sets")

    def checkpoints(self, name: str) -> CheckpointPlace:
        """Return where a training keeps its checkpoints until the step is done.

        Beside the other unfinished work of this machine; in the store where that is remote, for
        then the next attempt may be made by another machine.
        """
        if is_remote(self.store.root):
            return StoredCheckpoints(
                self.store, f"{self._unfinished}/{name}", self.durable / "checkpoint"
            )
        return LocalFolder(self.durable / name)

    def clear(self) -> None:
        """Remove what only an unfinished step needs."""
        if is_remote(self.store.root):
            self.store.clear(self._unfinished)
        shutil.rmtree(self.durable, ignore_errors=True)

    @property
    def _unfinished(self) -> str:
        return f"{STORE_SCHEME}unfinished/{self.durable.name}"

    def measure(self, name: str, value: Labelled, step: int = 0) -> None:
        """Record a number: in the event log, of which the result and MLflow are made.

        Behind a vocabulary of exact private counts every number is the operator's, whatever the
        step calls it: also accuracy on public text, and how many rows it was cut into.

        Raises:
            TypeError: a number without a label.
        """
        if self.exact_vocabulary and isinstance(value, Dp | Public):
            value = Operator(value.value)
        self.tracker.measure(name, value, step)

    def measure_cost(self, releases: Sequence[ReleaseRecord]) -> None:
        """Record what releases have cost together, as `epsilon` and `delta`; 0 where there is none.

        At the step that counts them: on a line of MLflow that is told of a model's pre-training
        and of its fine-tuning, the total of more releases is the last.

        Of several data sets, which hold other people, each has its own beside them, `epsilon/NAME`
        and `delta/NAME`, for no sum and no largest of them is anybody's guarantee: those without a
        name are the first one's, from which the vocabulary came.
        An infinite or a missing total is told in words, and as the largest number there is, as
        which MLflow keeps infinity: a smaller one, of an earlier step of the model, must not stand
        for it. What has an infinite ε is the operator's.
        """
        step = len(releases)
        found = totals(releases) or (DatasetTotal("", None, 0.0, 0.0),)
        named = [(f"/{total.dataset}", total) for total in found if len(found) > 1]
        for name, total in (("", found[0]), *named):
            if total.epsilon is None or math.isinf(total.epsilon):
                words = "no total: unlike units or neighbours" if total.epsilon is None else "inf"
                self.tracker.tag(f"epsilon{name}", words)
                label = Public if total.epsilon is None else Operator
                self.measure(f"epsilon{name}", label(sys.float_info.max), step)
            else:
                self.measure(f"epsilon{name}", Public(total.epsilon), step)
                self.measure(f"delta{name}", Public(total.delta), step)

    @property
    def exact_vocabulary(self) -> bool:
        """Whether a vocabulary of exact private counts is behind the output."""
        return any(release.is_exact_vocabulary for release in self.releases)

    def measured(self) -> list[MetricRecord]:
        """Return every number of this step, also of an attempt that this one continues."""
        return self.tracker.events.metrics()

    @property
    def seeds(self) -> SeedStore:
        """Return the operator's store of secret seeds."""
        return SeedStore(self.deployment.seeds)

    def content_key(self) -> bytes:
        """Return the secret under which contents are digested: nobody can confirm a guess."""
        return content_key(self.deployment, "content-digest")
