"""The labels of metrics by their names, as `tasks/tracking/metrics.toml` lists them."""

import re
import tomllib
from pathlib import Path

_FILE = Path(__file__).parents[1] / "tasks" / "tracking" / "metrics.toml"
_LISTED = {
    re.compile(re.escape(name).replace(r"\{\}", ".+")): labels.split(", ")
    for metrics in tomllib.loads(_FILE.read_text()).values()
    for name, (labels, _) in metrics.items()
}


def labels_of_metric(name: str) -> list[str]:
    """Return the labels that a metric may have; exactly one entry of the list must match it."""
    (labels,) = {tuple(labels) for listed, labels in _LISTED.items() if listed.fullmatch(name)}
    return list(labels)
