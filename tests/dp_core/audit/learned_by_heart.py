"""Models that are trained until they memorise their rows."""

from __future__ import annotations

from pathlib import Path

from dp_core.config.training import TrainingConfig
from dp_core.data.token_store import TokenStore
from dp_core.models.parameters import AnyModel, ModelConfig, fresh
from dp_core.training.checkpoints import LocalFolder
from dp_core.training.loop import OrdinaryUpdates, train
from dp_core.training.objectives import objective_for


def by_heart(
    shape: ModelConfig, store: TokenStore, folder: Path, *, updates: int, rows: int
) -> AnyModel:
    """Train without privacy, on `rows` rows per update."""
    return train(
        fresh(shape, 1),
        objective_for(shape),
        store=store,
        updates=OrdinaryUpdates(updates=updates, batch_rows=rows, seed=1),
        config=TrainingConfig(learning_rate=0.01, micro_rows=rows),
        seed=1,
        checkpoints=LocalFolder(folder / "kept"),
    )
