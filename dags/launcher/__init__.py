"""From a step's spec to an Airflow task, by process, docker or kubernetes."""

from dags.launcher.form import form, settings_from, settings_to_start, with_form
from dags.launcher.step_operator import LIGHT, TRAINING, defaults, step

__all__ = [
    "LIGHT",
    "TRAINING",
    "defaults",
    "form",
    "settings_from",
    "settings_to_start",
    "step",
    "with_form",
]
