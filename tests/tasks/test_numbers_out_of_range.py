from typing import Any

import pytest
from pydantic import ValidationError

from tasks.protocol.sweep import MOST_POINTS, SweepSettings

LONG = "9" * 400
EPSILON = "epsilon --sampling-rate 0.01 --noise-multiplier 1 --steps 10 --delta 1e-6"
TRAINING = "calibrate training --epsilon 2 --delta 1e-6 --sampling-rate 0.01 --steps 10"
VOCABULARY = "calibrate vocabulary --epsilon 2 --delta 1e-6 --tuple-words 16"
REGISTER = "ledger register ward --unit patient --epsilon 8 --delta 1e-6"


@pytest.mark.parametrize(
    ("command", "option", "values"),
    [
        (EPSILON, "--noise-multiplier", ["1e-300", "nan", "inf", "0", "1e300", "-1"]),
        (EPSILON, "--delta", ["1e-300", "nan", "1", "inf"]),
        (EPSILON, "--sampling-rate", ["1e-300", "nan", "2"]),
        (EPSILON, "--steps", [LONG, "0"]),
        (EPSILON, "--group", [LONG, "0"]),
        (TRAINING, "--epsilon", ["5e-324", "inf", "nan", "1e300"]),
        (TRAINING, "--delta", ["5e-324", "nan"]),
        (VOCABULARY, "--epsilon", ["5e-324", "inf", "nan", "1e300"]),
        (VOCABULARY, "--delta", ["1e-300", "nan"]),
        (VOCABULARY, "--tuple-words", [LONG, "0"]),
        (f"{VOCABULARY} --units 2000000", "--delta", ["1e-6"]),  # δ is not below 1/units
        (REGISTER, "--epsilon", ["5e-324", "inf", "nan", "1e300", "0"]),
        (REGISTER, "--delta", ["5e-324", "inf", "nan", "0"]),
        (REGISTER, "--order", ["nan", "1e300", "-1", "5e-324"]),
    ],
)
@pytest.mark.usefixtures("at_home")
def test_command_refuses_numbers_out_of_range_in_one_line(confide, command, option, values):
    for value in values:
        words = command.split()
        if option in words:
            words[words.index(option) + 1] = value
        else:
            words += [option, value]
        code, out, err = confide(*words)
        assert (code, out) == (2, ""), words
        assert len(err.strip().splitlines()) == 1, err
        # the ledger refuses without naming the option
        assert option in err or command == REGISTER, err


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
