"""Makes what the first step must find: the ledger's tables, and the key of content digests."""

from dp_core.privacy.ledger import Ledger
from tasks.runtime.context import content_key
from tasks.runtime.deployment import Deployment

if __name__ == "__main__":
    deployment = Deployment.from_environment()
    Ledger.open(deployment.ledger)  # whoever may only read it cannot make them
    content_key(deployment, "content-digest")  # the steps see its folder read only
