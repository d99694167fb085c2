"""Pre-training on hosts of the deployment's cluster: choosing the hosts and opening their rows."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dp_core.cluster.ray_cluster import RayCluster
from dp_core.data.token_store import TokenStore, joined
from dp_core.training.gradient_sources import GradientHosts
from tasks.context import StepContext
from tasks.protocol import PretrainSpec
from tasks.runtime.deployment import Deployment
from tasks.runtime.log import log
from tasks.steps.token_store_step import AUDIT, TRAIN
from tasks.storage import is_remote, local_path


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
