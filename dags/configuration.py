"""What a deployment may configure about DAGs: when sweeps run by themselves, and over what."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tasks.specs import SweepSettings, one_line


def sweep_schedule() -> str | None:
    """Return `CONFIDE_SWEEP_SCHEDULE` (cron, or a preset such as @daily); None: by hand only."""
    return os.environ.get("CONFIDE_SWEEP_SCHEDULE") or None


def sweep_settings() -> dict[str, Any]:
    """Return the JSON object in the file `CONFIDE_SWEEP_SETTINGS`: the sweep's own defaults.

    Raises:
        ValueError: what is wrong with it, in one line; Airflow shows it as an import error.
    """
    file = os.environ.get("CONFIDE_SWEEP_SETTINGS")
    if not file:
        return {}
    try:
        given = json.loads(Path(file).read_text())
        SweepSettings.model_validate(given)
    except ValidationError as error:
        raise ValueError(f"CONFIDE_SWEEP_SETTINGS: {one_line(error)}") from None
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"CONFIDE_SWEEP_SETTINGS: {type(error).__name__}: {error}") from None
    return dict(given)
