"""The inputs of language-model trainings: vocabulary, rows, hosts, and a fresh model's config.

This code shapes releases, so it is part of the code in the manifest of a charged training.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from dp_core.audit.canaries import throw_coins
from dp_core.cluster.ray_cluster import RayCluster
from dp_core.config.training import ArchitectureConfig, is_causal
from dp_core.data.token_store import TokenStore, joined
from dp_core.errors import BadInput
from dp_core.models.config import BertConfig, FeedForwardConfig, Gpt2Config, LlamaConfig
from dp_core.models.parameters import ModelConfig
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.gradient_sources import GradientHosts
from tasks.context import StepContext
from tasks.protocol import PretrainSpec
from tasks.releases.provenance import PRETRAINED, Role, fact, model_at, output_of, rows_at
from tasks.report.job_results import ARCHITECTURES
from tasks.results import Input
from tasks.runtime.deployment import Deployment
from tasks.runtime.log import log
from tasks.steps.token_store_step import AUDIT, HELD_OUT, TRAIN, keyed_store_digest
from tasks.storage import is_remote, local_path

# The role of the training rows, by mode.
_ROLES: dict[str, Role] = {
    "public": "public",
    "released": "released",
    "dp": "private",
    "nonprivate": "private",
}


@dataclass(frozen=True)
class TrainingInputs:
    """The outputs of earlier steps that a training reads, all with the same vocabulary.

    Attributes:
        vocabulary: the vocabulary of all inputs.
        rows: the token store whose units train.
        public: the token store whose held-out rows may be shown to anyone.
        private: the token store whose held-out rows are measured for the operator.
        initial: the model before the first update, if an earlier step made it.
    """

    vocabulary: Input
    rows: Input
    public: Input
    private: Input
    initial: Input | None

    @classmethod
    def open(cls, spec: PretrainSpec, context: StepContext) -> Self:
        """Open the inputs that the spec names, and check their roles and vocabularies.

        Raises:
            BadInput: an input does not have the role or vocabulary that the spec states.
        """
        vocabulary = output_of(context, spec.vocabulary_uri, "vocabulary")

        def rows(field: str, role: Role) -> Input:
            return rows_at(context, getattr(spec, field), role, vocabulary, field=field)

        return cls(
            vocabulary,
            rows("store_uri", _ROLES[spec.mode]),
            rows("public_store_uri", "public"),
            rows("private_store_uri", "private"),
            model_at(
                context, spec.init_uri, field="init_uri", steps=PRETRAINED, vocabulary=vocabulary
            )
            if spec.init_uri
            else None,
        )

    def train_store(self, spec: PretrainSpec, context: StepContext) -> TokenStore:
        """Return the training rows, unaltered since they were written: the noise is bound to them.

        Raises:
            BadInput: the rows were altered.
        """
        store = TokenStore.open(self.rows.folder / TRAIN)
        if keyed_store_digest(store, context) != self.rows.facts["digest"]:
            raise BadInput("the rows are not those that the step wrote", where=spec.store_uri)
        return store

    def with_audit_canaries(
        self, store: TokenStore, coins: PrivacySeed, context: StepContext
    ) -> tuple[TokenStore, list[int]]:
        """Return the training rows followed by the audit canaries that the release's coins choose.

        The copy is stored with the step's unfinished work, and removed together with it.

        Args:
            store: store of the private units.
            coins: seed of the coins, which choose the canaries.
            context: context of the training.

        Returns:
            The store, and the numbers of the chosen canaries.

        Raises:
            BadInput: the canaries were altered.
        """
        canaries = audit_canaries_of(self.rows, context)
        chosen = [int(i) for i in np.flatnonzero(throw_coins(coins, canaries.n_units))]
        return joined(context.durable / "rows", store, canaries, chosen), chosen


def audit_canaries_of(rows: Input, context: StepContext) -> TokenStore:
    """Return all audit canaries of a private store, unaltered since their step wrote them.

    Raises:
        BadInput: there are none, or they were altered.
    """
    if not (count := fact(rows, "audit_canaries")):
        raise BadInput(
            "the rows have no audit canaries",
            where="private_store_uri",
            fix="Set audit_canaries before the training.",
        )
    store = TokenStore.open(rows.folder / AUDIT)
    known = keyed_store_digest(store, context) == fact(rows, "audit_digest")
    if not known or store.n_units != count:
        raise BadInput("the audit canaries are not those that the step wrote", where="store_uri")
    return store


def held_out(source: Input) -> TokenStore | None:
    """Return the held-out rows of a store; None if the corpus was too small for any."""
    folder = source.folder / HELD_OUT
    return TokenStore.open(folder) if (folder / "store.json").exists() else None


def config_of(shape: ArchitectureConfig, vocabulary_size: int, length: int) -> ModelConfig:
    """Return the config of a fresh model that reads rows of `length` tokens."""
    if shape.model_kind == "feed-forward":
        return FeedForwardConfig(
            vocabulary_size,
            shape.hidden,
            shape.window,
            tuple(int(units) for units in shape.dense_units.split(",")),
            max_positions=length,
        )
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary_size,
        "hidden": shape.hidden,
        "layers": shape.layers,
        "max_positions": length,
    }
    if shape.model_kind == "distilbert":
        return BertConfig.of_size(**sizes, type_vocab=0)
    kinds: dict[str, type[BertConfig | Gpt2Config | LlamaConfig]]
    kinds = {"bert": BertConfig, "gpt2": Gpt2Config, "llama": LlamaConfig}
    return kinds[shape.model_kind].of_size(**sizes)


def refuse_other_architecture(config: ModelConfig, shape: ArchitectureConfig) -> None:
    """Refuse a public model of another architecture than the settings state, if either is causal.

    A BERT and a DistilBERT may replace each other.

    Raises:
        BadInput: the architectures differ; the message names both.
    """
    kind = config.kind
    if kind != shape.model_kind and (is_causal(kind) or is_causal(shape.model_kind)):
        raise BadInput(
            f"the folder holds a {ARCHITECTURES[kind]}, the settings ask for a "
            f"{ARCHITECTURES[shape.model_kind]}",
            where="public_model",
            fix=f"Set model_kind to {kind}, or give another folder.",
        )


@contextmanager
def training_hosts(
    spec: PretrainSpec, context: StepContext, canaries: Sequence[int] = ()
) -> Iterator[GradientHosts | None]:
    """Yield the training's hosts on the cluster, or None if it trains in the step's process.

    Args:
        spec: spec of the training.
        context: context of the step.
        canaries: numbers of the audit canaries that are trained on.

    Raises:
        ConfideError: the cluster does not answer, or lacks the requested device.
    """
    count = context.deployment.hosts
    cluster = context.cluster if count else None
    if not isinstance(cluster, RayCluster):
        yield None
        return
    hosts = cluster.hosts(count, spec.device)
    log(f"{context.run.task}: training on {count} host{'s' if count > 1 else ''} of the cluster")
    try:
        yield GradientHosts(hosts, StoredRows(spec.store_uri, tuple(canaries)))
    finally:
        hosts.end()


@dataclass(frozen=True)
class StoredRows:
    """The training rows, opened on a host of the training.

    The store's address comes from the environment of the host's machine. For a local store, the
    host reads where each row begins; the rows of its share are compared with the step's rows by
    digest.

    Attributes:
        uri: output folder of the token store whose units train.
        canaries: numbers of the audit canaries that are trained on.
    """

    uri: str
    canaries: tuple[int, ...] = ()

    def __call__(self) -> TokenStore:
        """Open the store.

        Raises:
            BadInput: the address is not below the deployment's store, or no store exists there.
        """
        store = Deployment.from_environment().open_store()
        store.key(self.uri)  # refuses an address outside the deployment's store
        folder = local_path(self.uri) if not is_remote(store.root) else store.local_copy(self.uri)
        train = TokenStore.open(folder / TRAIN)
        if not self.canaries:
            return train
        # Joined rows stay mapped after their files are removed, so a killed host leaves no files.
        with tempfile.TemporaryDirectory(prefix="confide-rows-") as scratch:
            more = TokenStore.open(folder / AUDIT)
            return joined(Path(scratch) / "rows", train, more, self.canaries)
