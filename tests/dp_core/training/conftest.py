"""Two logical devices, set before TensorFlow starts; a small token store; a small plan."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dp_core.config.training import TrainingConfig
from dp_core.data.token_store import TokenStore, TokenStoreWriter
from dp_core.models.config import BertConfig
from dp_core.models.parameters import AnyModel, Model, fresh
from dp_core.privacy.execution_plan import ExecutionPlan
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training import loop
from dp_core.training.checkpoints import LocalFolder
from dp_core.training.devices import configure
from dp_core.training.loop import PrivateUpdates, UpdateRule
from dp_core.training.objectives import objective_for

configure("mock-tpu:2")
tf.config.experimental.enable_op_determinism()  # as in `train`, for the whole process

WORDS, LENGTH, UNITS = 40, 12, 24


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """24 units of 1 to 4 rows, in a language of pairs: an odd word follows its even word."""
    rng = np.random.default_rng(0)
    writer = TokenStoreWriter(tmp_path_factory.mktemp("store"), LENGTH, WORDS)
    for unit in range(UNITS):
        rows = []
        for _ in range(1 + unit % 4):
            first = 6 + 2 * rng.integers(0, (WORDS - 6) // 2, rng.integers(2, 6))
            rows.append([2, *np.stack([first, first + 1], 1).ravel().tolist(), 3])
        writer.add_unit(f"unit {unit}", rows)
    return writer.finish()


@pytest.fixture(scope="session")
def config() -> BertConfig:
    return BertConfig(
        vocab_size=WORDS, hidden=16, layers=1, heads=2, intermediate=32, max_positions=LENGTH
    )


@pytest.fixture(scope="session")
def plan_of() -> Callable[..., ExecutionPlan]:
    def make(**changes: object) -> ExecutionPlan:
        settings: dict[str, object] = {
            "unit": PrivacyUnit.PATIENT,
            "declared_units": 30,
            "expected_batch": 9,
            "steps": 4,
            "noise_multiplier": 0.7,
            "clip_norm": 0.5,
            "delta": 1e-4,
            "examples_per_step": 2,
        }
        return ExecutionPlan.poisson(**(settings | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def config_of() -> Callable[..., TrainingConfig]:
    def make(**changes: object) -> TrainingConfig:
        settings: dict[str, object] = {"learning_rate": 0.01, "micro_rows": 8}
        return TrainingConfig(**(settings | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def train_in(
    store: TokenStore, config: BertConfig, config_of: Callable[..., TrainingConfig]
) -> Callable[..., Any]:
    """Train the small model by a plan or another update rule, with checkpoints in a folder."""

    def run(
        folder: Path,
        updates: ExecutionPlan | UpdateRule,
        *,
        model: Any = config,
        continuation: Any = None,
        init_seed: int = 1,
        **changes: Any,
    ) -> AnyModel:
        if isinstance(updates, ExecutionPlan):
            updates = PrivateUpdates(updates, PrivacySeed.fixed(4), b"manifest")
        start = model if isinstance(model, Model) else fresh(model, init_seed)
        settings = {
            "store": store,
            "updates": updates,
            "config": config_of(),
            "seed": init_seed,
            "checkpoints": LocalFolder(folder),
        }
        objective = objective_for(start.config, continuation)
        return loop.train(start, objective, **(settings | changes))

    return run


@pytest.fixture()
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture()
def train(train_in: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    return partial(train_in, folder)
