"""Recipes of DP training compared at the same ε, with single changes and combined.

    python -m benchmarks.bench_recipe [--only NAME;…] [--seeds 0,1] [--whole] [--minutes 9]
    python -m benchmarks.bench_recipe --curve dp_core/privacy/gain_curve.json   # existing results
    python -m benchmarks.bench_recipe --table       # into docs/measurements.md

Writes benchmarks/results/recipe.json: MLM accuracy on held-out private rows after DP pre-training
of one public model on the demo's made-up notes, by recipe, number of patients and seed. Existing
results are not measured again, so a stopped run can be resumed.

The noise of a recipe follows from its batch, updates and number of patients at EPSILON; the rows
always come from 6,000 made-up patients. Only `units_drawn` of a batch's units are drawn, with
the noise of all of them: their mean has the same expectation and a larger variance, so whole
batches (`--whole`) would not be worse.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from scipy.optimize import brentq

from benchmarks.utility.shares import replace_curves
from benchmarks.vocabulary_tables import filled
from dp_core.config.training import TrainingConfig
from dp_core.data.token_store import TokenStore
from dp_core.models.config import BertConfig
from dp_core.models.hugging_face import load_model
from dp_core.models.parameters import AnyModel, fresh, language_model
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.advice import GainCurve, noise_to_signal
from dp_core.privacy.execution_plan import Clipper, ExecutionPlan
from dp_core.privacy.noise_addition import UpdateNoise
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.devices import strategy_for
from dp_core.training.loop import OrdinaryUpdates, PrivateUpdates, UpdateRule, train
from dp_core.training.objectives import mlm_accuracy, objective_for
from dp_core.training.trainer import AdamW, Trainer
from tasks.execution.run_job import Job, run_job
from tasks.protocol.job import front_half
from tasks.protocol.settings import JobSettings
from tasks.runtime.deployment import Deployment

RESULT = ROOT / "benchmarks" / "results" / "recipe.json"
PAGE = ROOT / "docs" / "measurements.md"
EPSILON, DELTA = 5.44, 1e-6
KEPT = 16  # rows of a patient, so that recipes may read more rows than the demo keeps
FRONT = (
    "private_corpus",
    "public_corpus",
    "vocabulary",
    "canaries",
    "private_store",
    "public_store",
    "public_pretraining",
)


@dataclass(frozen=True)
class Recipe:
    """The settings of a training; `training` are settings of `TrainingConfig`."""

    batch: int = 256
    updates: int = 141
    rows: int = 4
    maskings: int = 1
    clipping: str = "flat"
    patients: int = 6000
    units_drawn: int = 32
    training: dict[str, Any] = field(default_factory=lambda: {"learning_rate": 6e-3})

    @property
    def rows_read(self) -> int:
        return self.batch * self.updates * self.rows * self.maskings

    def but(self, **changes: Any) -> Recipe:
        training = self.training | changes.pop("training", {})
        return Recipe(**{**asdict(self), **changes, "training": training})


BEFORE = Recipe(256, 282, 1, training={"learning_rate": 2e-3})
BASE = Recipe()
MANY = BASE.but(patients=60_000)
# Batches are the same share of the units, so that updates, σ and ε are equal and only σ/B differs.
BATCHES = {6_000: 256, 20_000: 853, 60_000: 2_560}
RATES = (2e-3, 6e-3, 12e-3, 24e-3)
BY_NOISE = {
    f"{patients:,} patients, batches of {batch:,}, learning rate {rate:g}": Recipe(
        batch, patients=patients, training={"learning_rate": rate}
    )
    for patients, batch in BATCHES.items()
    for rate in RATES
}
# Recipes without phrases and without a limit on computing: batches of a sixth of all units, and
# four rows of a unit with this number of maskings each.
ALONE = {
    f"{patients:,} patients, {updates} updates of {batch:,}, {maskings} maskings": Recipe(
        batch, updates, 4, maskings, patients=patients, units_drawn=drawn
    )
    for patients, batch, updates, maskings, drawn in (
        (6_000, 1024, 282, 4, 16),
        (6_000, 1024, 564, 4, 16),
        (20_000, 3413, 282, 4, 16),
        (20_000, 3413, 564, 4, 16),
        (60_000, 10_240, 282, 4, 40),
        (60_000, 10_240, 1128, 2, 24),
    )
}
RECIPES = (
    ALONE
    | BY_NOISE
    | {
        "before": BEFORE,
        "before, four rows": BEFORE.but(rows=4),
        "base": BASE,
        "base, one row": BASE.but(rows=1),
        "base, two rows of twice the updates": BASE.but(rows=2, updates=282),
        "base, batches twice as large, half the updates": BASE.but(batch=512, updates=71),
        "base, eight rows": BASE.but(rows=8),
        "base, sixteen rows": BASE.but(rows=16),
        "base, two maskings": BASE.but(maskings=2),
        "base, four maskings": BASE.but(maskings=4),
        "base, learning rate halved": BASE.but(training={"learning_rate": 3e-3}),
        "base, learning rate doubled": BASE.but(training={"learning_rate": 12e-3}),
        "base, DP-AdamBC, floor 0.1": BASE.but(
            training={"noise_floor": 0.1, "learning_rate": 15e-4}
        ),
        "base, DP-AdamBC, floor 1": BASE.but(training={"noise_floor": 1.0}),
        "base, momentum alone": BASE.but(training={"noise_floor": 100.0, "learning_rate": 6e-2}),
        "base, automatic clipping": BASE.but(clipping="automatic"),
        "batches of 1,024, one row": Recipe(1024, 282, 1, training={"learning_rate": 2e-3}),
        "batches of 1,024, one row, learning rate tripled": Recipe(1024, 282, 1),
        "batches of 1,024, four rows": Recipe(1024, 282, 4),
        "60,000: before": BEFORE.but(patients=60_000),
        "60,000: base": MANY,
        "60,000: base, eight rows": MANY.but(rows=8),
        "60,000: base, DP-AdamBC, floor 0.1": MANY.but(training={"noise_floor": 0.1}),
        "60,000: base, DP-AdamBC, floor 1": MANY.but(training={"noise_floor": 1.0}),
    }
)


def plan_of(recipe: Recipe, sigma: float, batch: float, declared: int) -> ExecutionPlan:
    return ExecutionPlan.poisson(
        unit="patient",
        declared_units=declared,
        expected_batch=batch,
        steps=recipe.updates,
        noise_multiplier=sigma,
        clip_norm=1.0,
        delta=DELTA,
        examples_per_step=recipe.rows,
        maskings_per_example=recipe.maskings,
        clipping=recipe.clipping,
    )


@functools.cache
def noise_of(batch: int, updates: int, patients: int) -> float:
    """Return the σ at which this number of updates of this batch costs EPSILON."""
    recipe = Recipe(batch, updates)

    def too_much(sigma: float) -> float:
        return epsilon_pld(plan_of(recipe, sigma, batch, patients).event(), DELTA) - EPSILON

    return float(brentq(too_much, 0.3, 20.0, xtol=1e-3))


@dataclass(frozen=True)
class Start:
    """The public model, the training rows, and the held-out rows."""

    model: AnyModel
    train: TokenStore
    held_out: TokenStore


def prepare(home: Path) -> Start:
    """Make corpora, vocabulary, rows and the public model by the product's steps."""
    os.environ["CONFIDE_HOME"] = str(home)
    deployment = Deployment.from_environment()
    steps = front_half(JobSettings(nonprivate=False))
    more = JobSettings(nonprivate=False, max_examples_per_unit=KEPT)
    steps["more_rows"] = front_half(more)["private_store"]
    job = Job("recipe", "recipe", "recipe", [("", n, steps[n]) for n in (*FRONT, "more_rows")])
    done = run_job(job, deployment, lambda *_: None)
    if done.exit_code:
        raise SystemExit(done.failed)
    folder = {name: Path(uri.removeprefix("file://")) for name, uri in done.outputs.items()}
    return Start(
        language_model(load_model(folder["public_pretraining"])),
        TokenStore.open(folder["more_rows"] / "train"),
        TokenStore.open(folder["private_store"] / "held_out"),
    )


def accuracy(start: Start, model: AnyModel) -> float:
    return mlm_accuracy(model, start.held_out, seed=1, max_rows=start.held_out.n_rows)


def trial(start: Start, recipe: Recipe, drawn: int, seed: int) -> float:
    sigma = noise_of(recipe.batch, recipe.updates, recipe.patients)
    plan = plan_of(recipe, sigma * drawn / recipe.batch, drawn, start.train.n_units)
    updates = PrivateUpdates(plan, PrivacySeed.fixed(seed), b"benchmark")
    config = TrainingConfig(**recipe.training, micro_rows=min(64, drawn * recipe.rows))
    return accuracy(start, trained(start, updates, config))


def without_privacy(start: Start, seed: int) -> float:
    """Return the accuracy of the job's training without privacy, on the same rows."""
    job = JobSettings()
    rows = job.nonprivate_batch_size * job.examples_per_step
    updates = OrdinaryUpdates(job.updates_after("nonprivate", job.epochs), rows, seed)
    config = TrainingConfig(learning_rate=job.nonprivate_learning_rate, micro_rows=64)
    return accuracy(start, trained(start, updates, config))


def trained(start: Start, updates: UpdateRule, config: TrainingConfig) -> AnyModel:
    nowhere = SimpleNamespace(names=list, write=lambda *_: None, where="")
    return train(
        start.model,
        objective_for(start.model.config),
        store=start.train,
        updates=updates,
        config=config,
        seed=1,
        checkpoints=nowhere,
    )


def costs(rounds: int = 40) -> dict[str, float]:
    """Return the seconds of one update without its gradients, the kinds measured in turn."""
    config = BertConfig.of_size(vocab_size=4096, hidden=128, layers=2)
    parameters = fresh(config, 0).parameters

    def trainer(floor: float) -> Trainer:
        optimizer = AdamW(0.9, 0.98, 0.01, floor)
        return Trainer(strategy_for("cpu"), config, parameters, optimizer, Clipper(1.0))

    kinds = {"plain": trainer(0.0), "DP-AdamBC": trainer(0.1)}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for step in range(rounds):
        noise = UpdateNoise(PrivacySeed.fixed(0), b"benchmark", step, 1.0, 1.0)
        for kind, kind_trainer in kinds.items():
            clock = time.perf_counter()
            kind_trainer.apply_update(step=step, learning_rate=1e-6, divisor=32.0, noise=noise)
            seconds[kind].append(time.perf_counter() - clock)
    return {kind: statistics.median(times[3:]) for kind, times in seconds.items()}


def share_of_gain(kept: dict[str, Any], accuracy: float) -> float:
    """Return an accuracy as a share of the gain from public text to training without privacy."""
    best = statistics.mean(kept["without privacy"].values())
    return (accuracy - kept["public"]) / (best - kept["public"])


def _accuracy(trial: dict[str, Any]) -> str:
    return f"{100 * trial['mean']:.1f}% ({len(trial['accuracy'])})"


def curve(kept: dict[str, Any]) -> GainCurve:
    """Return the gain by noise-to-signal ratio, with a point for each training.

    Only recipes that differ from the default in batch, updates, rows and maskings are used, as in
    the advice.
    """
    points = set()
    for trial_result in kept["trials"].values():
        recipe = Recipe(
            **{setting.name: trial_result["recipe"][setting.name] for setting in fields(Recipe)}
        )
        if (recipe.training, recipe.clipping) != (BASE.training, BASE.clipping):
            continue
        sigma = trial_result["recipe"]["noise"]
        figure = noise_to_signal(plan_of(recipe, sigma, recipe.batch, recipe.patients))
        for accuracy in trial_result["accuracy"].values():
            points.add((float(f"{figure:.6g}"), round(share_of_gain(kept, accuracy), 4)))
    figures, shares = zip(*sorted(points), strict=True)
    source = (
        "with the noise of 6,000, 20,000 and 60,000 patients at ε = 5.4; of large batches a part "
        "was drawn, with the noise of the whole"
    )
    return GainCurve("gradients", "MLM accuracy on private text", figures, shares, source)


def tables(kept: dict[str, Any]) -> dict[str, str]:
    """Return the page's table of the trainings in `ALONE`, from the results file."""
    rows = [
        "noise of | updates | rows × maskings | rows read | MLM accuracy, private text (seeds) "
        "| share of the gain",
        " | ".join(["---"] * 6),
    ]
    for name in ("base", *ALONE):
        if name not in kept["trials"]:
            continue
        trial_result, recipe = kept["trials"][name], RECIPES[name]
        rows.append(
            f"{recipe.patients:,} patients | {recipe.updates:,} of {recipe.batch:,} "
            f"| {recipe.rows} × {recipe.maskings} | {recipe.rows_read / 1e6:.2g} million "
            f"| {_accuracy(trial_result)} | {share_of_gain(kept, trial_result['mean']):.0%}"
        )
    return {"alone": "\n".join(f"| {row} |" for row in rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="names of recipes, separated by semicolons")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--whole", action="store_true", help="draw whole batches")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no trial after this time")
    parser.add_argument("--home", type=Path, default=ROOT / ".confide" / "bench-recipe")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument(
        "--curve", type=Path, help="write the curve of the advice to this file, and stop"
    )
    parser.add_argument("--table", action="store_true", help="write the page's table; stop")
    options = parser.parse_args()
    if options.table:
        PAGE.write_text(filled(PAGE.read_text(), tables(json.loads(options.output.read_text()))))
        return
    if options.curve:
        replace_curves(options.curve, [curve(json.loads(options.output.read_text()))])
        return
    began = time.monotonic()
    start = prepare(options.home)
    kept = json.loads(options.output.read_text()) if options.output.exists() else {"trials": {}}
    if "seconds of an update without gradients" not in kept:
        kept["seconds of an update without gradients"] = costs()
    public = accuracy(start, start.model)
    if kept.get("public") != public:  # another model, or other rows
        kept |= {"trials": {}, "without privacy": {}, "public": public}
    kept |= {"epsilon": EPSILON, "delta": DELTA}
    seeds = [int(seed) for seed in options.seeds.split(",")]
    for seed in seeds:
        once = kept.setdefault("without privacy", {})
        if str(seed) not in once:
            once[str(seed)] = without_privacy(start, seed)
    names = options.only.split(";") if options.only else list(RECIPES)
    for seed, name in itertools.product(seeds, names):
        if time.monotonic() - began > 60 * options.minutes:
            return
        recipe = RECIPES[name]
        drawn = recipe.batch if options.whole else recipe.units_drawn
        description = asdict(recipe) | {
            "noise": noise_of(recipe.batch, recipe.updates, recipe.patients),
            "rows_read": recipe.rows_read,
            "units_drawn": drawn,
        }
        key = f"{name} (whole batches)" if options.whole else name
        trial_result = kept["trials"].get(key, {})
        if trial_result.get("recipe") != description:
            trial_result = {"recipe": description, "accuracy": {}}
        if str(seed) in trial_result["accuracy"]:
            continue
        clock = time.monotonic()
        trial_result["accuracy"][str(seed)] = trial(start, recipe, drawn, seed)
        trial_result["mean"] = statistics.mean(trial_result["accuracy"].values())
        kept["trials"][key] = trial_result
        options.output.parent.mkdir(exist_ok=True)
        options.output.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        took = time.monotonic() - clock
        print(f"{100 * trial_result['mean']:6.2f}  {key} ({took:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
