"""From a step's spec to an Airflow task: the one place that knows process, docker and kubernetes.

A DAG file says `step("vocabulary", plan=...)`; which launcher starts the step is the deployment's
choice (`CONFIDE_LAUNCHER`), and only the chosen one's provider is ever imported.
"""

from dags.launcher.factory import LIGHT, TRAINING, defaults, step
from dags.launcher.form import form, settings_from, settings_to_start

__all__ = [
    "LIGHT",
    "TRAINING",
    "defaults",
    "form",
    "settings_from",
    "settings_to_start",
    "step",
]
