"""Creates the ledger's tables, the key of content digests, and the secrets of a Ray cluster."""

from dp_core.cluster.node import make_secrets
from dp_core.privacy.ledger import Ledger
from tasks.context import content_key
from tasks.runtime.deployment import Deployment

if __name__ == "__main__":
    deployment = Deployment.from_environment()
    Ledger.open(deployment.ledger)  # the ledger's reader may not create tables
    if deployment.cluster_secrets is not None:
        make_secrets(deployment.cluster_secrets)
    content_key(deployment, "content-digest")  # the steps' mount of its folder is read-only
