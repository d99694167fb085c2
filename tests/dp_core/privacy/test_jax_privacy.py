"""Least errors, ε and calibrated σ of correlated noise, compared with jax_privacy.

`make test-jax-privacy` sets up its environment and runs these tests, which are otherwise skipped.
"""

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mechanism_examples import power_strategy

from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.accounting.calibration import noise_for
from dp_core.privacy.matrix_factorization import Workload, least_error_strategy
from dp_core.privacy.mechanisms import CyclicPoissonGaussian

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv" / "jax-privacy" / "bin" / "python"
DELTA = 1e-6

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="no .venv/jax-privacy: run `make test-jax-privacy`"
)


LEAST = [(282, 4), (282, 16), (2000, 8)]
EVENTS = [(0.08, 2.1743, 2000, 8), (0.1707, 1.6038, 282, 4), (0.3, 1.2, 101, 3)]
PLANS = [(0.16, 101, 4, 5.44), (0.064, 2000, 8, 8.0)]


def all_questions() -> list[tuple[str, dict[str, Any]]]:
    questions: list[tuple[str, dict[str, Any]]] = [
        ("least error", {"updates": n, "bands": b}) for n, b in LEAST
    ]
    names = ("rate", "sigma", "updates", "bands")
    questions += [
        ("epsilon", dict(zip(names, event, strict=True)) | {"delta": DELTA}) for event in EVENTS
    ]
    for rate, updates, bands, epsilon in PLANS:
        coefficients = power_strategy(bands, 0.5).values.tolist()
        plan = {"coefficients": coefficients, "rate": rate, "updates": updates}
        questions.append(("sigma", plan | {"epsilon": epsilon, "delta": DELTA}))
    return questions


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The answers of jax_privacy to all questions, grouped by kind."""
    folder = tmp_path_factory.mktemp("jax-privacy")
    questions, replies = folder / "questions.json", folder / "answers.json"
    asked = all_questions()
    questions.write_text(json.dumps(asked))
    script = Path(__file__).with_name("jax_privacy_side.py")
    subprocess.run([PYTHON, script, questions, replies], check=True)
    by_kind: dict[str, list[Any]] = {kind: [] for kind, _ in asked}
    for (kind, _), answer in zip(asked, json.loads(replies.read_text()), strict=True):
        by_kind[kind].append(answer)
    return by_kind


def test_least_error_is_within_a_fifth_of_a_percent_of_jax_privacys(answers):
    for (updates, bands), least in zip(LEAST, answers["least error"], strict=True):
        strategy = least_error_strategy(bands, Workload((1.0,) * updates))
        sums = np.cumsum(strategy.noising(updates))
        error = math.sqrt(np.dot(np.arange(updates, 0, -1), sums**2) / updates) * strategy.norm
        assert least * 0.9999 < error < least * 1.002


def test_epsilon_equals_jax_privacys(answers):
    for (rate, sigma, updates, bands), epsilon in zip(EVENTS, answers["epsilon"], strict=True):
        event = CyclicPoissonGaussian(bands, ((rate, sigma, updates),))
        assert epsilon_pld(event, DELTA) == pytest.approx(epsilon, rel=2e-3)


def test_calibrated_noise_equals_jax_privacys(answers):
    for (rate, updates, bands, epsilon), sigma in zip(PLANS, answers["sigma"], strict=True):

        def event(s: float, bands=bands, rate=rate, updates=updates) -> CyclicPoissonGaussian:
            return CyclicPoissonGaussian(bands, ((rate, s, updates),))

        assert noise_for(event, epsilon, DELTA) == pytest.approx(sigma, rel=2e-3)
