"""Launchers: Airflow tasks that run a step as a process, a container or a pod."""

from dags.launcher.form import (
    PLAN_ONLY,
    THIS_PAGE,
    configured_object,
    form,
    form_defaults,
    schedule,
    settings_from,
    settings_to_start,
    with_form,
)
from dags.launcher.outcome import approval, outcome
from dags.launcher.step_operator import (
    TRAINING,
    NamedSteps,
    Plan,
    defaults,
    each,
    shown,
    step,
    title,
)
