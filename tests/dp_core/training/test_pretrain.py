import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from noised_updates import assert_gaussian
from safetensors.numpy import load_file
from small_models import logits_of

from dp_core.errors import BadInput, Unfinished
from dp_core.models.adapters import merged, prepared, trained_names
from dp_core.models.config import BertConfig, Gpt2Config, LlamaConfig
from dp_core.models.hugging_face import load_model, save
from dp_core.models.parameters import fresh
from dp_core.nn import LORA_SCALE
from dp_core.privacy.accounting.calibration import with_bands
from dp_core.privacy.batch_selection import PoissonSampling, TruncatedPoissonSampling
from dp_core.privacy.execution_plan import AdaptiveClipping, BatchPhase, noised_count
from dp_core.privacy.matrix_factorization import Workload
from dp_core.privacy.noise_addition import UpdateNoise
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training import batches as rows
from dp_core.training.batches import Batches
from dp_core.training.checkpoints import LocalFolder
from dp_core.training.loop import ClippedUpdates, EvaluationHook, OrdinaryUpdates, PrivateUpdates
from dp_core.training.objectives import mlm_accuracy
from dp_core.training.trainer import PublicNoise, Trainer


def same(a, b):
    return all(np.array_equal(a.parameters[n], b.parameters[n]) for n in a.parameters)


def test_training_without_privacy_learns_the_language(train, store, config_of):
    losses = []
    model = train(
        OrdinaryUpdates(500, 24, seed=1),
        config=config_of(micro_rows=24),
        progress=lambda p: losses.append(p.loss),
    )
    assert losses[-1] < 2.0 < np.log(34)
    # an odd word follows its even word, so a neighbour determines half of the masked words
    assert mlm_accuracy(model, store, seed=0) > 0.35


def test_weights_depend_on_the_seed_and_a_finished_run_is_not_repeated(train, plan_of, tmp_path):
    reports = []
    first, again, finished, other = (
        train(
            PrivateUpdates(plan_of(), PrivacySeed.fixed(seed), b"manifest"),
            checkpoints=LocalFolder(tmp_path / folder),
            progress=lambda p, name=name: reports.append((name, p.update)),
        )
        for name, seed, folder in (("1", 4, "a"), ("2", 4, "b"), ("3", 4, "b"), ("4", 5, "c"))
    )
    assert same(first, again) and same(first, finished)
    assert not same(first, other)
    # The finished run reports once more, because it may have ended before its last report.
    assert [update for name, update in reports if name == "3"] == [4]


def test_checkpoints_of_another_run_are_refused(train, plan_of, config_of):
    train(plan_of())
    for updates, changes in (
        (PrivateUpdates(plan_of(), PrivacySeed.fixed(4), b"other"), {}),
        (plan_of(noise_multiplier=0.8), {}),
        (plan_of(), {"config": config_of(learning_rate=0.02)}),
        (plan_of(), {"config": config_of(trained_parameters="biases-and-norms")}),
        (plan_of(), {"init_seed": 2}),
        (OrdinaryUpdates(4, 18, seed=1), {}),
    ):
        with pytest.raises(BadInput, match="belongs to another run"):
            train(updates, **changes)


def test_empty_batch_makes_a_noised_update(train, plan_of, config):
    """At a rate of 10⁻⁹ no unit is ever drawn, but the noise changes the weights."""
    reports = []
    plan = plan_of(declared_units=10**9, expected_batch=1, delta=1e-10)
    model = train(plan, progress=reports.append)
    assert reports[-1].batch == 0
    assert np.isnan(reports[-1].loss)
    start = fresh(config, 1).parameters
    for name, value in model.parameters.items():
        assert np.isfinite(value).all()
        assert (value != start[name]).mean() > 0.99, name


def test_realised_batch_equals_the_drawn_units(train, plan_of):
    reports = []
    train(plan_of(expected_batch=30, steps=2), progress=reports.append)
    assert reports[-1].batch == 24  # rate 1: all 24 units, though 30 are declared
    assert 0 < reports[-1].clipped <= 1


@pytest.mark.cases
def test_inconsistent_arguments_are_refused(train, plan_of, config, declared, changes, message):
    with pytest.raises(BadInput, match=message):
        train(plan_of(declared_units=declared), model=dataclasses.replace(config, **changes))


@pytest.mark.parametrize(("field", "least"), [("updates", 0), ("batch_rows", 1)])
def test_negative_updates_and_empty_batches_are_refused(field, least):
    numbers = {"updates": 1, "batch_rows": 1, "seed": 0}
    assert getattr(OrdinaryUpdates(**numbers | {field: least}), field) == least
    with pytest.raises(BadInput, match=field):
        OrdinaryUpdates(**numbers | {field: least - 1})


SEED = PrivacySeed.fixed(4)


@pytest.fixture()
def seen(monkeypatch):
    """The calls of the trainer, update by update, with their effect."""
    return _record(monkeypatch, Trainer.add, Trainer.apply_update)


@pytest.fixture()
def calls(monkeypatch):
    """The calls of the trainer, without the arithmetic."""
    return _record(monkeypatch, lambda *_: None, lambda *_, **__: None)


def _record(monkeypatch, add, apply_update):
    updates = [SimpleNamespace(batches=[], clips=set())]

    def added(self, batch):
        updates[-1].batches.append(batch)
        updates[-1].clips.add(self.clip_norm)
        return add(self, batch)

    def updated(self, **arguments):
        updates[-1].__dict__.update(arguments)
        updates.append(SimpleNamespace(batches=[], clips=set()))
        return apply_update(self, **arguments)

    monkeypatch.setattr(Trainer, "add", added)
    monkeypatch.setattr(Trainer, "apply_update", updated)
    return updates


def units_of(update):
    return sum(int((batch.shares > 0).any(1).sum()) for batch in update.batches)


@pytest.mark.parametrize(
    "sampling,phases,micro_batches",
    [
        (PoissonSampling(), ((4, 9),), None),
        (PoissonSampling(), ((3, 4), (3, 20)), None),
        (TruncatedPoissonSampling(cap=10), ((4, 9),), 3),
    ],
    ids=["poisson", "growing batches", "truncated-poisson"],
)
def test_training_reads_exactly_the_units_that_are_drawn(
    train, plan_of, store, calls, sampling, phases, micro_batches
):
    schedule = tuple(BatchPhase(*phase) for phase in phases)
    plan = dataclasses.replace(plan_of(), sampling=sampling, schedule=schedule)
    train(plan)
    sampler = plan.sampler(SEED, store.n_units)
    for t, update in enumerate(calls[:-1]):
        assert units_of(update) == len(sampler.batch(t))
        assert update.divisor == plan.expected_batch(t)  # for any draw
        if micro_batches:  # static: padding replaces units that are not drawn
            assert len(update.batches) == micro_batches
    assert len(calls) == 1 + plan.steps
    shapes = {tuple(a.shape for a in batch) for update in calls for batch in update.batches}
    assert len(shapes) == 1
    assert len({units_of(u) for u in calls[:-1]}) > 1


def test_ordinary_updates_read_the_configured_number_of_rows(train, config_of, calls):
    train(OrdinaryUpdates(3, 7, seed=1), config=config_of(micro_rows=6))
    assert [u.divisor for u in calls[:-1]] == [7] * 3
    assert [units_of(u) for u in calls[:-1]] == [7] * 3
    assert [len(u.batches) for u in calls[:-1]] == [2] * 3


def adaptive_plan(plan_of, **changes):
    adaptive = AdaptiveClipping(quantile=0.5, count_noise=2.0, learning_rate=0.5)
    return plan_of(adaptive=adaptive, clip_norm=0.1, **changes)


def test_learned_clip_norm_scales_clipping_and_noise(train, plan_of, seen):
    plan = adaptive_plan(plan_of)
    reported = []
    train(plan, progress=lambda p: reported.append(p.clip_norm))
    z_delta = plan.gradient_noise_multiplier()
    assert z_delta == pytest.approx((0.7**-2 - 4.0**-2) ** -0.5)
    clips = []
    for update in seen[:-1]:
        [clip] = update.clips
        assert update.noise.noise_multiplier == pytest.approx(z_delta)
        assert update.noise.clip_norm == clip
        clips.append(clip)
    assert clips[0] == pytest.approx(0.1)
    assert len(set(clips)) == 4  # every update changed it
    assert clips == sorted(clips)  # gradients are larger than 0.1, so it increases
    assert reported[-1] > clips[-1]


LORA = {"trained_parameters": "lora", "lora_rank": 2}


@pytest.mark.parametrize(
    ("adaptive", "bands", "changes"),
    [(True, 1, {}), (True, 1, {"noise_floor": 0.5}), (False, 2, {}), (False, 1, LORA)],
    ids=["learned clip norm", "noise correction", "correlated noise", "adapters"],
)
def test_time_limited_run_ends_in_the_same_bits(
    train, plan_of, config_of, tmp_path, adaptive, bands, changes
):
    """Checkpoint settings may change between runs. Past noise is made again from the seed."""
    plan = adaptive_plan(plan_of, steps=3) if adaptive else plan_of(steps=3)
    plan = with_bands(plan, bands, Workload((1.0,) * 3)) if bands > 1 else plan
    place, reports = LocalFolder(tmp_path / "whole"), []
    last_point = {"progress": reports.append, "points": (3,)}
    whole = train(plan, config=config_of(**changes), checkpoints=place, **last_point)
    undisturbed = reports[-1]
    for done in (1, 2):  # at least one update per run, or it would never end
        with pytest.raises(Unfinished, match=f"time is up after {done} of 3 updates") as stopped:
            train(plan, config=config_of(time_box_minutes=1e-9, **changes), points=(3,))
        assert stopped.value.exit_code == 75
    last = config_of(checkpoint_every=2, time_box_minutes=1e5, **changes)
    assert same(whole, train(plan, config=last, **last_point))
    # The counts since the last point of the curve survive a stop.
    assert reports[-1] == dataclasses.replace(undisturbed, loss=reports[-1].loss)
    assert reports[-1].loss == pytest.approx(undisturbed.loss, rel=1e-5)
    with place.read(place.names()[-1]) as file:
        kept = load_file(file)
    assert not [name for name in kept if "past" in name]  # noise is not stored
    if changes == LORA:  # only trained parameters are stored
        frozen = ("kernel", "embeddings", LORA_SCALE)
        assert not [name for name in kept if any(part in name for part in frozen)]


def test_checkpoint_precedes_every_evaluation(train, config_of, tmp_path):
    """A resumed run repeats every state whose score was reported."""
    kept, there = LocalFolder(tmp_path / "kept"), {}

    def evaluate(done, weights):
        there[done] = len(kept.names())

    train(
        OrdinaryUpdates(5, 18, seed=1),
        checkpoints=kept,
        hook=EvaluationHook(frozenset({2, 4}), evaluate),
    )
    assert there == {2: 1, 4: 2}


@pytest.mark.parametrize("continuation", [None, np.zeros(3, bool)])
def test_masking_whole_words_needs_continuation_flags(train, config_of, continuation):
    with pytest.raises(BadInput, match="continuation pieces"):
        train(
            OrdinaryUpdates(1, 1, seed=1),
            config=config_of(whole_words=True),
            continuation=continuation,
        )


@pytest.mark.parametrize("private", [True, False])
def test_training_masks_whole_words_if_set(train, plan_of, config_of, store, calls, private):
    odd = np.arange(store.vocabulary_size) % 2 == 1
    odd[:6] = False
    plan = PrivateUpdates(plan_of(), SEED, b"manifest")
    updates = plan if private else OrdinaryUpdates(4, 18, seed=1)
    train(updates, config=config_of(whole_words=True), continuation=odd)
    masked = [partial(rows.masked_examples, continuation=flags) for flags in (odd, None)]
    whole, pieces = (
        Batches(store, updates.sampler(store), updates.rows(8, 1), examples) for examples in masked
    )
    for t, update in enumerate(calls[:-1]):
        for ours, expected in zip(update.batches, whole.micro_batches(t), strict=True):
            np.testing.assert_array_equal(ours.positions, expected.positions)
    assert any((a.positions != b.positions).any() for a, b in zip(
        calls[0].batches, pieces.micro_batches(0), strict=True))  # fmt: skip


# --- training of a part of the parameters

SIZES = {
    "vocab_size": 40, "hidden": 16, "layers": 1, "heads": 2, "intermediate": 32,
    "max_positions": 12,
}  # fmt: skip


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *((kind, BertConfig) for kind in ("lora", "biases-and-norms", "top-layer")),
        *(("lora", shape) for shape in (Gpt2Config, LlamaConfig)),
    ],
)
def test_frozen_parameters_stay_the_same_bits(train, plan_of, config_of, kind, shape, private):
    settings = config_of(trained_parameters=kind, lora_rank=2)
    fresh_model = fresh(shape(**SIZES), 1)
    start = prepared(fresh_model, settings, 1)
    updates = plan_of(steps=2) if private else OrdinaryUpdates(2, 8, seed=1)
    model = train(updates, config=settings, model=fresh_model)
    names = trained_names(start, settings)
    assert model.parameters.keys() == start.parameters.keys()
    for name, before in start.parameters.items():
        same = np.array_equal(model.parameters[name], before)
        assert same == (name not in names), name


def test_checkpoint_with_other_frozen_parameters_belongs_to_another_run(
    train, plan_of, config_of, config
):
    """A checkpoint holds only the adapters, which need their frozen weights."""
    settings = config_of(**LORA)
    train(plan_of(), config=settings, model=fresh(config, 1))
    with pytest.raises(BadInput, match="another run"):
        train(plan_of(), config=settings, model=fresh(config, 2))


def test_trained_adapter_is_saved_and_read_back(train, plan_of, config_of, config, tmp_path):
    """Opacus issue 820: training looked normal, but the saved adapter was not the trained one.

    Every adapter has learned, the base is unchanged, and the reloaded model, as an adapter or
    merged, computes the same as the trained model.
    """
    base = fresh(config, 1)
    settings = config_of(**LORA, learning_rate=0.05)
    model = train(plan_of(), config=settings, model=base)
    learned = [n for n in model.parameters if n.endswith(("lora_a", "lora_b"))]
    assert len(learned) == 2 * 4
    begun = prepared(base, settings, 1).parameters
    assert not [n for n in learned if np.array_equal(model.parameters[n], begun[n])]

    ids = np.array([[2, 7, 8, 9, 3]])
    logits = logits_of(model, ids)
    assert np.abs(logits - logits_of(base, ids)).max() > 0.01
    save(merged(model), tmp_path)
    np.testing.assert_allclose(logits_of(load_model(tmp_path), ids), logits, atol=1e-5)


# --- private updates of a trainer that only records its calls

COUNT = 3.5  # Σ (bᵢ − ½), as the devices counted it


def carry_out(plan, steps, seed=SEED):
    """Return the updates that a trainer is called to make, and the clip norms in between."""
    calls, updates = [], PrivateUpdates(plan, seed, b"manifest")
    trainer = SimpleNamespace(
        clipper=updates.clipper(),
        apply_update=lambda **what: calls.append(what),
        take_count_within=lambda: COUNT,
    )
    norms = []
    for step in range(steps):
        updates.apply_update(trainer, step, 0.1)
        norms.append(trainer.clipper.clip_norm)
    return calls, norms


def test_noise_of_an_update_is_keyed_by_its_number(plan_of):
    plan = plan_of()
    calls, norms = carry_out(plan, 3)
    assert calls == [
        {
            "step": t,
            "learning_rate": 0.1,
            "divisor": plan.expected_batch(t),
            "noise": UpdateNoise(SEED, b"manifest", t, plan.noise_multiplier, plan.clip_norm),
            "loudness": 1.0,
        }
        for t in range(3)
    ]
    assert norms == [plan.clip_norm] * 3


def test_correlated_noise_keeps_its_past_over_all_updates(plan_of):
    plan = plan_of()
    plan = with_bands(plan, 2, Workload((1.0,) * plan.steps))
    calls, _ = carry_out(plan, 3)
    noises = [what["noise"] for what in calls]
    assert [noise.strategy for noise in noises] == [plan.strategy] * 3
    assert noises[0].past is noises[1].past is noises[2].past is not None
    louder = plan.strategy.loudness(plan.steps)
    assert [what["loudness"] for what in calls] == [louder] * 3
    assert louder > 1.2
    other, _ = carry_out(plan, 1)
    assert other[0]["noise"].past is not noises[0].past


def test_clip_norm_is_learned_from_the_noised_count(plan_of):
    """As accounted: the next norm is a function of count + N(0, σ_b²)."""
    adaptive = AdaptiveClipping(0.5, 3.0)
    plan = plan_of(adaptive=adaptive)
    calls, norms = carry_out(plan, 3)
    norm = plan.clip_norm
    for t in range(3):
        assert calls[t]["noise"].clip_norm == pytest.approx(norm)
        seen = noised_count(COUNT, SEED, b"manifest", t, 3.0)
        assert abs(seen - COUNT) > 1e-3
        norm = adaptive.next_norm(norm, seen, plan.expected_batch(t), plan.clip_norm)
        assert norms[t] == pytest.approx(norm, rel=1e-12)


@pytest.mark.statistical
def test_noise_of_the_count_has_its_sigma():
    sigma = 3.0
    sample = np.array([noised_count(11.5, SEED, b"m", t, sigma) for t in range(400)]) - 11.5
    assert_gaussian(sample, sigma)
    assert noised_count(11.5, SEED, b"n", 0, sigma) != 11.5 + sample[0]


def test_dropout_and_adams_epsilon_change_the_weights_alike_in_every_layout(
    train, plan_of, config_of, tmp_path
):
    def trained(**changes: Any) -> Any:
        folder = LocalFolder(tmp_path / str(changes))
        return train(plan_of(), config=config_of(**changes), checkpoints=folder)

    usual = trained()
    for changes in ({"dropout": 0.3}, {"adam_epsilon": 1e-2}):
        first, second = trained(**changes), trained(**changes, micro_rows=2)
        assert not same(first, usual)
        for name, value in first.parameters.items():
            np.testing.assert_allclose(value, second.parameters[name], atol=1e-5, err_msg=name)


def test_clipping_without_a_guarantee_admits_any_noise(train, tmp_path, seen):
    def trained(clip_norm: float, sigma: float) -> Any:
        folder = LocalFolder(tmp_path / f"{clip_norm} {sigma}")
        return train(ClippedUpdates(2, 24, 1.0, 4, clip_norm, sigma, 1), checkpoints=folder)

    clipped, hidden, loud = (trained(0.01, sigma) for sigma in (0.0, 1e-20, 5.0))
    assert [(units_of(u), u.divisor) for u in seen[:-1]] == [(24, 24)] * 6  # all, at a rate of 1
    assert {norm for u in seen[:-1] for norm in u.clips} == {0.01}
    for name, value in clipped.parameters.items():
        np.testing.assert_allclose(value, hidden.parameters[name], atol=1e-6, err_msg=name)
    assert not same(clipped, loud) and not same(clipped, trained(1e6, 0.0))


def test_public_noise_has_its_deviation_and_a_stream_for_each_parameter_and_update():
    totals = {name: np.zeros(20_000, np.float32) for name in ("a", "b")}
    first, later = (PublicNoise(1, t, 0.5).means(totals, 2.0) for t in (0, 1))
    pairs = ((first["a"], first["b"]), (first["a"], later["a"]))
    for noise, other in pairs:
        assert_gaussian(noise.astype(np.float64), 0.25)
        assert_gaussian((noise - other).astype(np.float64), 0.25 * 2**0.5)  # they are independent
