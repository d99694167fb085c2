"""Makes what the first step must find: the ledger's tables, and the key of content digests."""

from dp_core.privacy.ledger import Ledger
from tasks.deployment import Deployment
from tasks.workbench import content_key

if __name__ == "__main__":
    deployment = Deployment.from_environment()
    Ledger.open(deployment.ledger)  # whoever may only read it cannot make them
    content_key(deployment, "content-digest")  # the steps see its folder read only
