"""What is measured: corpora, recipes, and the cells that they make with sizes, seeds and ε.

A recipe is data: settings changed from the corpus's own. To measure a new setting, add a line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dp_core.errors import BadInput
from tasks.commands.settings import PRESETS

EPSILONS = (1.0, 3.0, 5.8, 8.0)  # 5.8: the demo's
SEEDS = (1, 2, 3)
MADE_UP_UNITS = (2_000, 6_000, 20_000, 60_000)
REFERENCE = "shipped"  # the recipe whose public-only and non-private models all cells are held to


@dataclass(frozen=True)
class Corpus:
    """A private corpus, with what is trained on it.

    Attributes:
        units: sizes that are measured; of real text, the declared bound alone.
        settings: of the job, beside its defaults.
        files: settings that name files, relative to the folder `CONFIDE_DATA`.
        public: the files that the operator declares public: all of them, here.
    """

    units: tuple[int, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def of(self, units: int, seed: int) -> dict[str, Any]:
        """Return the settings of a size and seed.

        Raises:
            BadInput: its files are asked for, and `CONFIDE_DATA` names no folder that has them.
        """
        made = {**self.settings, "seed": seed, "declared_units": units}
        if not self.files:
            return made | {"synthetic_patients": units}
        folder = Path(os.environ.get("CONFIDE_DATA") or "/nowhere")
        for name, file in self.files.items():
            if not (folder / file).exists():
                raise BadInput(f"there is no {file}", where=f"CONFIDE_DATA, {name}")
            made[name] = str((folder / file).resolve())
        return made


def _preset(name: str) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(PRESETS[name].read_text())
    return settings


_REAL = _preset("real-text")
_BESIDE_NOTES = {
    "public_path": "wikitext-2/train.txt.xz",
    "entities_train": "ner_bc5cdr/train.tsv",
    "entities_test": "ner_bc5cdr/test.tsv",
}
CORPORA: dict[str, Corpus] = {
    "made-up": Corpus(MADE_UP_UNITS),
    "made-up causal": Corpus(MADE_UP_UNITS, {"model_kind": "gpt2"}),
    "noteevents_format": Corpus(
        (_REAL["declared_units"],),
        _REAL,
        {"private_path": "noteevents_format/NOTEEVENTS_derived.csv.xz", **_BESIDE_NOTES},
    ),
    "pmc_rct_articles": Corpus(
        (2600,),
        {
            **_REAL,
            "private_format": "jsonl",
            "private_dataset": "pmc-rct-articles",
            "jsonl_fields": "text,doc_id,user_id",
            "unit": "document",
        },
        {"private_path": "pmc_rct_articles/articles.jsonl.xz", **_BESIDE_NOTES},
    ),
}


@dataclass(frozen=True)
class Recipe:
    """A way to spend a budget.

    Attributes:
        settings: changed from the corpus's own.
        advised: batch, updates and the vocabulary's ε are those of `confide advise`.
        of: the corpora that it is measured on; empty: all.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    advised: bool = False
    of: tuple[str, ...] = ()


# One item at a time, then all of them together. The noise is calibrated to each cell's ε.
RECIPES: dict[str, Recipe] = {
    REFERENCE: Recipe(),
    "advised": Recipe(advised=True),
    "batch 64": Recipe({"batch_size": 64}),
    "batch 1024": Recipe({"batch_size": 1024, "learning_rate": 4e-3}),
    "learning rate ×3": Recipe({"learning_rate": 6e-3}),
    "all rows of a unit": Recipe({"examples_per_step": 4}),
    "automatic clipping": Recipe({"clipping": "automatic"}),
    "adaptive clipping": Recipe({"clipping": "adaptive"}),
    "β₂ 0.999": Recipe({"beta2": 0.999}),
    "growing batches": Recipe({"batch_size": 512, "first_batch_size": 128}),
    "all together": Recipe(
        {"learning_rate": 6e-3, "examples_per_step": 4, "clipping": "automatic"},
        advised=True,
    ),
}

# What the figure shows; and what `confide advise` can name, of which its curve is made.
FIGURED = (REFERENCE, "advised", "all together")  # before and after
ADVISABLE = (REFERENCE, "advised", "batch 64", "batch 1024")

# Hours become minutes: whether the harness works, not what it measures.
QUICK: dict[str, Any] = {
    "public_steps": 60,
    "epochs": 1.0,
    "finetune_epochs": 1,
    "canaries_per_group": 1,
}
QUICK_UNITS = 400  # of made-up notes


@dataclass(frozen=True)
class Cell:
    """One training with DP, and what it is held to."""

    corpus: str
    units: int
    seed: int
    epsilon: float
    recipe: str

    @property
    def key(self) -> str:
        """Its name in the results."""
        return f"{self.corpus}/{self.units}/{self.seed}/{self.epsilon:g}/{self.recipe}"

    @property
    def reference(self) -> str:
        """The name of its public-only and non-private models: shared by recipes and ε."""
        return f"{self.corpus}/{self.units}/{self.seed}"

    def settings(self, *, reference: bool = False, quick: bool = False) -> dict[str, Any]:
        """Return the cell's settings before its noise is calibrated, or its reference's."""
        corpus = CORPORA[self.corpus]
        recipe = RECIPES[REFERENCE if reference else self.recipe]
        made = {**corpus.of(self.units, self.seed), **recipe.settings}
        return made | (QUICK if quick else {})


def cells(
    *,
    only: str = "",
    units: Iterable[int] = (),
    seeds: Iterable[int] = SEEDS,
    epsilons: Iterable[float] = EPSILONS,
    quick: bool = False,
) -> list[Cell]:
    """Return the cells, those first that say most: small before large, the shipped recipe first.

    Args:
        only: parts of keys, with commas between them: all of them must stand in a cell's key.
        units: sizes; empty: all.
        seeds: of initialisation and made-up data.
        epsilons: budgets in total.
        quick: one small size of each made-up corpus, and no real text.
    """
    asked, words = set(units), [word for word in only.split(",") if word]
    found = []
    for name, corpus in CORPORA.items():
        if quick and corpus.files:
            continue
        sizes = (QUICK_UNITS,) if quick else corpus.units
        found += [
            Cell(name, size, seed, epsilon, recipe)
            for size in sizes
            if not asked or size in asked
            for seed in seeds
            for recipe, told in RECIPES.items()
            if not told.of or name in told.of
            for epsilon in epsilons
        ]
    order = list(RECIPES)
    found.sort(key=lambda cell: (cell.seed, order.index(cell.recipe), cell.units))
    return [cell for cell in found if all(word in cell.key for word in words)]
