"""Sends metrics to MLflow that steps could not send during an outage, if no other step follows."""

import sys
import time
from pathlib import Path

from tasks.runtime.deployment import Deployment
from tasks.tracking.mlflow import send_all

EVERY = 60.0  # seconds
ALIVE = Path("/tmp/mlflow-sync")  # noqa: S108 - touched on every round, for the health check


def main() -> None:
    """Send waiting events every minute; a running step sends its events itself."""
    deployment, before = Deployment.from_environment(), 0
    while True:
        ALIVE.touch()
        left = send_all(deployment)
        if left != before:
            print(f"event logs that MLflow has not taken: {left}", file=sys.stderr, flush=True)
        before = left
        time.sleep(EVERY)


if __name__ == "__main__":
    main()
