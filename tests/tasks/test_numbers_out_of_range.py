from typing import Any

import pytest
from command_line import REFUSED
from pydantic import ValidationError

from tasks.protocol.sweep import MOST_POINTS, SweepSettings

LONG = "9" * 400


@pytest.mark.parametrize("case", REFUSED["numbers"])
@pytest.mark.usefixtures("at_home")
def test_command_refuses_numbers_out_of_range_in_one_line(confide, case):
    option = case["option"]
    for value in case["values"]:
        words = [*case["command"].split(), option, LONG if value == "400 digits" else value]
        assert option in confide.refused(*words) or "ledger register" in case["command"]


@pytest.mark.parametrize("field", ["declared_units", "sweep_batch_sizes"])
def test_settings_refuse_numbers_of_hundreds_of_digits(field):
    with pytest.raises(ValidationError, match=field):
        SweepSettings.model_validate({field: LONG})


def test_too_large_sweep_is_refused_before_its_grid_is_expanded(monkeypatch):
    def expand(self: SweepSettings) -> list[Any]:
        raise AssertionError("the grid was expanded")

    monkeypatch.setattr(SweepSettings, "grid", expand)
    grid = {
        "sweep_noise_multipliers": ",".join(f"{1 + i / 1000:g}" for i in range(1000)),
        "sweep_batch_sizes": "128",
        "sweep_epochs": ",".join(str(i) for i in range(1, 1001)),
    }
    with pytest.raises(ValidationError, match=f"1000 × 1 × 1000 = 1000000 .* {MOST_POINTS}"):
        SweepSettings.model_validate(grid)
