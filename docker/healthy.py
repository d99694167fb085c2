"""Exit with 0 if Airflow's API reports that a component is healthy: healthy.py COMPONENT.

`airflow jobs check` would start all of Airflow for each check; this script costs a twentieth of it.
"""

import json
import os
import sys
import urllib.request

MONITOR = "/api/v2/monitor/health"


def main(component: str) -> int:
    """Return 0 if the component is healthy, else 1."""
    server = os.environ.get("CONFIDE_AIRFLOW_API", "http://localhost:8080")
    with urllib.request.urlopen(server + MONITOR, timeout=5) as answer:  # noqa: S310 - http only
        status = json.load(answer)[component]["status"]
    print(f"{component}: {status}")
    return 0 if status == "healthy" else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1]))
    except (OSError, KeyError, ValueError) as error:
        sys.exit(f"{sys.argv[1:]}: {type(error).__name__}")
