"""The measured cells: corpora, recipes, sizes, seeds and ε.

A recipe is data: changes of the corpus's settings. To measure another setting, add a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.real_text import ARTICLES, NOTES_AND_ENTITIES, PUBLIC_AND_ENTITIES, existing_files
from dp_core.privacy.advice import Recipe as Advisable
from tasks.protocol.settings_file import preset

EPSILONS = (1.0, 3.0, 5.8, 8.0)  # 5.8 is the demo's ε
SEEDS = (1, 2, 3)
# the recipe whose public-only and non-private models are the references of all cells
REFERENCE = "gradients"

# The number of updates is constant, so batches grow with the corpus; for large corpora fewer rows
# of each patient are read, to save time.
MADE_UP: dict[int, dict[str, Any]] = {
    2_000: {"batch_size": 85, "nonprivate_batch_size": 24},
    6_000: {},
    20_000: {"batch_size": 853, "epochs": 5, "examples_per_step": 2},
    60_000: {"batch_size": 2_560, "epochs": 4, "examples_per_step": 1},
}


@dataclass(frozen=True)
class Corpus:
    """A private corpus, with the settings of its trainings.

    Attributes:
        sizes: the measured numbers of units (for real text, the bound), with their settings.
        settings: settings of the job that differ from its defaults.
        files: settings that name files, relative to the folder `CONFIDE_DATA`.
    """

    sizes: Mapping[int, Mapping[str, Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def of(self, units: int, seed: int) -> dict[str, Any]:
        """Return the settings of a size and seed.

        Raises:
            BadInput: a required file is missing in the folder that `CONFIDE_DATA` names.
        """
        size_settings = self.sizes.get(units, {})
        made = {**self.settings, **size_settings, "seed": seed, "declared_units": units}
        if not self.files:
            return made | {"synthetic_patients": units}
        return made | existing_files(self.files)


_REAL = preset("real-text")
# For recipes without vocabulary settings: below two thirds of ε = 1 too, so that one vocabulary
# serves every ε.
_WORDS = {"vocabulary_epsilon": 0.6}
CORPORA: dict[str, Corpus] = {
    "made-up": Corpus(MADE_UP, _WORDS),
    "made-up causal": Corpus(MADE_UP, {**_WORDS, "model_kind": "gpt2"}),
    "noteevents_format": Corpus({_REAL["declared_units"]: {}}, _REAL, NOTES_AND_ENTITIES),
    "pmc_rct_articles": Corpus(
        {2600: {}},
        {
            **_REAL,
            "private_format": "jsonl",
            "private_dataset": "pmc-rct-articles",
            "private_columns": "text:text,document:doc_id,patient:user_id",
            "unit": "document",
        },
        {**PUBLIC_AND_ENTITIES, "private_path": ARTICLES},
    ),
}


@dataclass(frozen=True)
class Recipe:
    """A way to spend a budget.

    Attributes:
        settings: changes of the corpus's settings.
        of_epsilon: settings that are a share of the total ε.
        of_units: integer settings that are a share of the units.
        advised: whether `confide advise` chooses batch, updates and the vocabulary's ε.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    of_epsilon: Mapping[str, float] = field(default_factory=dict)
    of_units: Mapping[str, float] = field(default_factory=dict)
    advised: bool = False

    def of(self, epsilon: float, units: int) -> dict[str, Any]:
        """Return the changed settings at this total ε and for this number of units."""
        shares = {name: round(share * epsilon, 3) for name, share in self.of_epsilon.items()}
        wholes = {name: round(share * units) for name, share in self.of_units.items()}
        return {**self.settings, **shares, **wholes}


# Phrases first: the remaining ε is spent on few updates of large batches.
_PHRASES = {"phrases_steps": 1500, "written_public_share": 0.0}
_AMONG = {"phrases_steps": 1500, "written_public_share": 0.5}
_FEW = {"epochs": 6.0}  # for real text, for which a job has 30
_LARGE = {"batch_size": 1024 / 6000}
# rows and maskings of a unit; takes longer
_MANY = {"examples_per_step": 4, "maskings_per_example": 2}

# The noise of training is calibrated to the part of each cell's ε that earlier releases leave.
RECIPES: dict[str, Recipe] = {
    REFERENCE: Recipe(),
    "phrases + gradients": Recipe(
        _PHRASES, {"vocabulary_epsilon": 0.25, "phrases_epsilon": 0.75}, _LARGE
    ),
    "phrases + gradients of many rows": Recipe(
        _PHRASES | _MANY, {"vocabulary_epsilon": 0.25, "phrases_epsilon": 0.75}, _LARGE
    ),
    "phrases + gradients, more computing": Recipe(
        _PHRASES | _MANY | {"phrases_steps": 4500},
        {"vocabulary_epsilon": 0.25, "phrases_epsilon": 0.75},
        _LARGE,
    ),
    "phrases + gradients, few words": Recipe(_PHRASES, {"phrases_epsilon": 0.8}, _LARGE),
    "phrases among public text + gradients": Recipe(_AMONG, {"phrases_epsilon": 0.8}, _LARGE),
    "phrases among public text + gradients of many rows": Recipe(
        _AMONG | _FEW | _MANY, {"vocabulary_epsilon": 0.25, "phrases_epsilon": 0.75}, _LARGE
    ),
    "phrases + few gradients": Recipe(_PHRASES | _FEW, {"phrases_epsilon": 0.8}, _LARGE),
    "phrases among public text + few gradients": Recipe(
        _AMONG | _FEW, {"phrases_epsilon": 0.8}, _LARGE
    ),
    # The default with one item removed or added.
    "one row of a unit": Recipe({"examples_per_step": 1}),
    "four maskings of one row": Recipe({"examples_per_step": 1, "maskings_per_example": 4}),
    "two maskings": Recipe({"maskings_per_example": 2}),
    "batch ÷4": Recipe({"batch_size": 64}),
    "batch ×4": Recipe({"batch_size": 1024}),
    "learning rate ÷3": Recipe({"learning_rate": 2e-3}),
    "automatic clipping": Recipe({"clipping": "automatic"}),
    "adaptive clipping": Recipe({"clipping": "adaptive"}),
    "DP-AdamBC": Recipe({"noise_floor": 1.0}),
    "correlated noise": Recipe({"noise_bands": 0}),
    "LoRA": Recipe({"trained_parameters": "lora"}),
    "biases and norms": Recipe({"trained_parameters": "biases-and-norms"}),
    "growing batches": Recipe({"batch_size": 512, "first_batch_size": 128}),
    "advised": Recipe(advised=True),
    "phrases at half of ε": Recipe(_PHRASES, {"phrases_epsilon": 0.5}, _LARGE),
    "phrases + small batches": Recipe(_PHRASES, {"phrases_epsilon": 0.8}),
}

# The recipes of the figure; and the recipes that `confide advise` can name, from which its curves
# are made (the curves without phrases are made by `benchmarks.bench_recipe`).
FIGURED = (
    REFERENCE,
    "phrases + gradients, few words",
    "phrases + gradients",
    "phrases + gradients, more computing",
)
ADVISABLE: dict[Advisable, tuple[str, ...]] = {
    "phrases": ("phrases + gradients", "phrases + gradients of many rows")
}

# Small enough for minutes: tests the harness only.
QUICK: dict[str, Any] = {
    "public_steps": 60,
    "epochs": 1.0,
    "finetune_epochs": 1,
    "canaries_per_group": 1,
}
QUICK_UNITS = 400  # made-up notes


@dataclass(frozen=True)
class Cell:
    """One training with DP, and its reference."""

    corpus: str
    units: int
    seed: int
    epsilon: float
    recipe: str

    @property
    def key(self) -> str:
        """The name of the cell in the results."""
        return f"{self.corpus}/{self.units}/{self.seed}/{self.epsilon:g}/{self.recipe}"

    @property
    def reference(self) -> str:
        """The name of the public-only and non-private models, shared by recipes of equal ε_V."""
        common = f"{self.corpus}/{self.units}/{self.seed}"
        words = self._words()
        return f"{common} (ε {words['vocabulary_epsilon']:g} for words)" if words else common

    def _words(self) -> dict[str, Any]:
        """Return the vocabulary's ε if the recipe sets it; models of other vocabularies differ."""
        changes = RECIPES[self.recipe].of(self.epsilon, self.units)
        return {name: value for name, value in changes.items() if name == "vocabulary_epsilon"}

    def settings(self, *, reference: bool = False, quick: bool = False) -> dict[str, Any]:
        """Return the settings of the cell or its reference, before calibration of the noise."""
        corpus = CORPORA[self.corpus]
        recipe = RECIPES[REFERENCE if reference else self.recipe]
        made = {**corpus.of(self.units, self.seed), **recipe.of(self.epsilon, self.units)}
        made |= self._words()
        return made | (QUICK if quick else {})


def cells(
    *,
    corpora: Iterable[str] = (),
    recipes: Iterable[str] = (),
    units: Iterable[int] = (),
    seeds: Iterable[int] = SEEDS,
    epsilons: Iterable[float] = EPSILONS,
    quick: bool = False,
) -> list[Cell]:
    """Return the cells in order of importance: small before large, the default first.

    Args:
        corpora: keys of `CORPORA`; all if empty.
        recipes: keys of `RECIPES`; all if empty.
        units: sizes; all if empty.
        seeds: seeds of initialisation and made-up data.
        epsilons: total budgets.
        quick: one small size of each made-up corpus, and no real text.
    """
    sizes_wanted, selected = set(units), []
    for name in corpora or CORPORA:
        corpus = CORPORA[name]
        if quick and corpus.files:
            continue
        sizes = (QUICK_UNITS,) if quick else tuple(corpus.sizes)
        selected += [
            Cell(name, size, seed, epsilon, recipe)
            for size in sizes
            if not sizes_wanted or size in sizes_wanted
            for seed in seeds
            for recipe in recipes or RECIPES
            for epsilon in epsilons
        ]
    order = list(RECIPES)
    return sorted(selected, key=lambda cell: (cell.seed, order.index(cell.recipe), cell.units))
