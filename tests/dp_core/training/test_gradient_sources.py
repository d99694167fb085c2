import dataclasses
import itertools
from contextlib import suppress

import numpy as np
import pytest
from hosts_here import STORES, HostsHere, Interrupted, OpenStore
from noised_updates import assert_gaussian, flat

from dp_core.errors import BadInput, Unfinished
from dp_core.models.parameters import fresh
from dp_core.privacy.accounting.calibration import with_bands
from dp_core.privacy.batch_selection import (
    CyclicPoissonSampling,
    PoissonSampling,
    TruncatedPoissonSampling,
)
from dp_core.privacy.execution_plan import AdaptiveClipping, BatchPhase, ExecutionPlan
from dp_core.privacy.matrix_factorization import Workload
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.noise_addition import noised_means
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training import loop
from dp_core.training import trainer as trainer_module
from dp_core.training.batches import Batches, ShuffledRows, SingleRows, UnitRows, masked_examples
from dp_core.training.checkpoints import LocalFolder
from dp_core.training.gradient_sources import (
    GradientHosts,
    HostShare,
    added,
    marked,
    marks_of,
    share,
)
from dp_core.training.loop import OrdinaryUpdates, PrivateUpdates
from dp_core.training.objectives import objective_for
from dp_core.training.trainer import Trainer

STEPS, SIGMA, CLIP, BATCH = 2, 0.7, 0.5, 9
SEED = PrivacySeed.fixed(4)


@pytest.fixture(autouse=True, scope="module")
def _stores(store):
    STORES["store"] = store
    yield
    STORES.clear()


def hosts_of(count):
    """Return the hosts of a training; 0 trains without hosts."""
    return GradientHosts(HostsHere(count), OpenStore()) if count else None


class Recorded:
    """The sums, noise and counts of a training."""

    def __init__(self):
        self.sums, self.noised, self.noise = [], [], []

    def noised_means(self, totals, noise, divisor):
        means = noised_means(totals, noise, divisor)
        self.sums.append({name: np.array(total) for name, total in totals.items()})
        self.noised.append({name: np.array(mean) for name, mean in means.items()})
        self.noise.append(noise)
        assert divisor == BATCH
        return means


@pytest.fixture(scope="module")
def trained(train_in, plan_of, config_of, tmp_path_factory):
    """Train without hosts, and on 1, 2 and 4; with two, stop the run after each update."""
    plan, runs = plan_of(steps=STEPS, noise_multiplier=SIGMA, clip_norm=CLIP), {}
    for count in (0, 1, 2, 4):
        seen, folder = Recorded(), tmp_path_factory.mktemp("checkpoints")
        box = 1e-9 if count == 2 else 0.0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer_module, "noised_means", seen.noised_means)
            model = None
            while model is None:
                with suppress(Unfinished):
                    model = train_in(
                        folder, plan, config=config_of(time_box_minutes=box), hosts=hosts_of(count)
                    )
        seen.weights = model.parameters
        runs[count] = seen
    return runs


def test_weights_of_any_number_of_hosts_agree_to_rounding(trained):
    alone = flat(trained[0].weights)
    np.testing.assert_array_equal(flat(trained[1].weights), alone)  # to the bit
    for count in (2, 4):
        np.testing.assert_allclose(flat(trained[count].weights), alone, atol=2e-6)
    assert np.abs(alone).max() > 0.01


def test_sums_cover_all_units_and_not_only_the_units_of_a_host(trained):
    for count in (1, 2, 4):
        assert len(trained[count].sums) == STEPS
        for alone, spread in zip(trained[0].sums, trained[count].sums, strict=True):
            assert np.linalg.norm(flat(alone)) > CLIP
            np.testing.assert_allclose(flat(spread), flat(alone), atol=2e-5)


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_noise_is_added_once_on_any_number_of_hosts(trained, count):
    """The noised mean minus the mean is σ·C / B for all n, not √n times as much."""
    seen = trained[count]
    sample = np.concatenate(
        [
            flat(noised) - flat(sums) / BATCH
            for noised, sums in zip(seen.noised, seen.sums, strict=True)
        ]
    )
    right = SIGMA * CLIP / BATCH
    assert len(sample) > 6000
    assert_gaussian(sample, right, (1 / np.sqrt(2), np.sqrt(2), 2.0))  # noise of 2 or 4 hosts
    for spread, alone in zip(seen.noised, trained[0].noised, strict=True):
        np.testing.assert_allclose(flat(spread), flat(alone), atol=1e-6)
    assert [noise.t for noise in seen.noise] == list(range(STEPS))


@pytest.fixture()
def run(train_in, tmp_path):
    """Train the small model on a number of hosts, or on given hosts."""
    folders = itertools.count()

    def run(updates, hosts, **changes):
        points = []
        model = train_in(
            tmp_path / str(next(folders)),
            updates,
            hosts=hosts_of(hosts) if isinstance(hosts, int) else hosts,
            progress=points.append,
            **changes,
        )
        counts = [(p.update, p.batch, p.clipped, p.clip_norm) for p in points if p.at_point]
        return flat(model.parameters), counts, [p.loss for p in points if p.at_point]

    return run


def assert_same(spread, alone, atol=2e-6):
    np.testing.assert_allclose(spread[0], alone[0], atol=atol)
    assert spread[1] == alone[1]  # counts and learned clip norms, exactly
    np.testing.assert_allclose(spread[2], alone[2], rtol=1e-5)


LORA = {"trained_parameters": "lora", "lora_rank": 2, "noise_floor": 1.0, "whole_words": True}


@pytest.mark.parametrize(
    ("updates_of", "settings", "device", "clip_norms", "atol"),
    [
        (lambda plan_of: plan_of(steps=2, adaptive=AdaptiveClipping(0.5, 2.0)), LORA,
         "mock-tpu:2", 2, 2e-6),
        (lambda plan_of: with_bands(plan_of(steps=3), 2, Workload((1.0,) * 3)), {},
         "cpu", 1, 2e-6),
        (lambda _: OrdinaryUpdates(2, 13, 0), {}, "cpu", 1, 2e-5),
    ],
    ids=["adaptive clipping and adapters on TPU slices", "correlated noise", "without privacy"],
)  # fmt: skip
def test_training_on_two_hosts_equals_training_in_one_process(
    run, store, plan_of, config_of, updates_of, settings, device, clip_norms, atol
):
    words = np.arange(store.vocabulary_size) % 2 == 1
    words[:7] = False
    alone, spread = (
        run(updates_of(plan_of), count, config=config_of(**settings), device=on, continuation=words)
        for count, on in ((0, "cpu"), (2, device))
    )
    assert_same(spread, alone, atol)
    assert len({clip_norm for *_, clip_norm in alone[1]}) == clip_norms


def test_interrupted_update_leaves_no_gradients_in_the_sum(run, plan_of, monkeypatch):
    expected = run(plan_of(steps=2), 2)
    take, lost = Trainer.take, iter([False, True, True])  # the second host's first two calls

    def interrupted(trainer):
        if next(lost, False):
            raise Interrupted
        return take(trainer)

    monkeypatch.setattr(Trainer, "take", interrupted)
    assert_same(run(plan_of(steps=2), 2), expected, atol=0)


# --- what hosts receive


def test_hosts_receive_no_seed_and_nothing_that_determines_noise(run, plan_of):
    hosts = hosts_of(2)
    run(plan_of(steps=1), hosts)
    assert [field.name for field in dataclasses.fields(HostShare)] == [
        "units", "config", "trained", "frozen", "clipping", "precision", "dropout", "device",
        "continuation", "rows", "open_rows", "rows_digest",
    ]  # fmt: skip
    received = b"".join(hosts.hosts.sent)
    assert len(hosts.hosts.sent) == 4  # two shares, and one update for each host
    secret = SEED._secret
    assert len(secret) >= 16
    for never in (secret, SEED.derive("noise", b"manifest", 0, "w"), b"manifest"):
        assert never not in received
        assert never.hex().encode() not in received
    assert SEED.derive("sampling", "poisson", 0)[:16] not in received
    assert b"ExecutionPlan" not in received and b"PrivacySeed" not in received


def test_size_of_an_update_does_not_depend_on_the_draw(run, plan_of):
    sizes = set()
    for batch in (2, 20):
        hosts = hosts_of(2)
        run(plan_of(steps=2, expected_batch=batch), hosts)
        sizes |= {len(content) for content in hosts.hosts.sent[2:]}
    assert len(sizes) == 1


def test_host_with_other_rows_than_the_step_is_refused(run, store, plan_of):
    changed = store.tokens.copy()
    changed[-1, 1] += 1  # in the last unit, which the second host owns
    STORES["other"] = dataclasses.replace(store, tokens=changed)
    with pytest.raises(BadInput, match="a host reads other rows than the step"):
        run(plan_of(), GradientHosts(HostsHere(2), OpenStore("other")))


def test_objective_that_hosts_do_not_support_is_refused(store, config, config_of, tmp_path):
    tagging = dataclasses.replace(objective_for(config), name="tagging")
    with pytest.raises(BadInput, match="do not train the objective tagging"):
        loop.train(
            fresh(config, 0), tagging, store=store, updates=OrdinaryUpdates(1, 4, 0),
            config=config_of(), seed=0, checkpoints=LocalFolder(tmp_path), hosts=hosts_of(1),
        )  # fmt: skip


# --- shares and draws


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("n_units", [1, 5, 24, 1000])
def test_shares_partition_the_units_evenly(count, n_units):
    shares = [share(number, count, n_units) for number in range(count)]
    assert [unit for units in shares for unit in units] == list(range(n_units))
    sizes = {len(units) for units in shares}
    assert max(sizes) - min(sizes) <= 1


LAWS = [PoissonSampling(), TruncatedPoissonSampling(cap=6), CyclicPoissonSampling(parts=2)]


def units_in(batches):
    """Return the units of micro-batches, without padding."""
    units = []
    for batch in batches:
        for i in np.flatnonzero(batch.shares.sum(1) > 0):
            units.append(tuple(array[i].tobytes() for array in batch))
    return units


def parts_of(source, store, step, drawn, count):
    """Return the units that each host reads of a draw, computed only from the host's input."""
    parts = []
    for number in range(count):
        units = share(number, count, store.n_units)
        items = source.rows.items(store, units)
        marks = marks_of(drawn, items)
        assert len(marks) == len(items)
        parts.append(units_in(source.rows.made(store, masked_examples, step, marked(marks, items))))
    return parts


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.kind)
@pytest.mark.parametrize("rows,maskings", [(1, 1), (2, 2)])
def test_union_over_hosts_is_the_whole_batch(store, law, rows, maskings):
    plan = ExecutionPlan(
        unit=PrivacyUnit.PATIENT, declared_units=30, sampling=law, clip_norm=0.5,
        noise_multiplier=1.0, schedule=(BatchPhase(12, 9),), delta=1e-4, examples_per_step=rows,
        maskings_per_example=maskings,
    )  # fmt: skip
    seed, sizes = PrivacySeed.fixed(9), set()
    for count in (1, 2, 3, 4):
        updates = PrivateUpdates(plan, seed, b"m")
        source = Batches(store, updates.sampler(store), updates.rows(8, 1, count))
        for step in range(plan.steps):
            drawn = source.sampler.batch(step)
            expected = law.draw(seed, store.n_units, plan.sampling_rate(step), step)
            assert drawn.tolist() == expected.tolist()
            parts = parts_of(source, store, step, drawn, count)
            whole = units_in(source.micro_batches(step))
            assert [unit for part in parts for unit in part] == whole
            assert len(whole) == len(drawn)
            sizes.add(len(drawn))
    assert len(sizes) > 1
    if law.kind == "truncated-poisson":
        assert max(sizes) == law.cap  # the whole batch was cut, and not each share


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("batch_rows", [23, 150])  # the second draws rows of several epochs
def test_union_over_hosts_is_the_whole_batch_in_epochs(store, count, batch_rows):
    source = Batches(store, ShuffledRows(store.n_rows, 1, batch_rows), SingleRows(1, 4))
    for step in range(4):
        parts = parts_of(source, store, step, source.sampler.batch(step), count)
        whole = units_in(source.micro_batches(step))
        assert sorted(unit for part in parts for unit in part) == sorted(whole)
        assert len(whole) == batch_rows


def test_micro_batches_grow_with_the_devices_of_a_host(store):
    rows = UnitRows(1, 4, 2, least=6)
    once, twice = (list(rows.on(n).made(store, masked_examples, 0, np.arange(20))) for n in (1, 2))
    assert [len(b.ids) for b in once] == [4] * 6
    assert [len(b.ids) for b in twice] == [8] * 3
    assert units_in(once) == units_in(twice)


def test_sums_are_added_once_in_the_order_of_hosts():
    rng = np.random.default_rng(0)
    sums = [[rng.standard_normal(s).astype(np.float32) for s in ((3, 99), (7,))] for _ in range(4)]
    counts = [np.array([0.5 * number, 3, number, -0.5]) for number in range(4)]
    totals, total_counts = added(iter(list(zip(sums, counts, strict=True))))
    for name in range(2):
        right = ((sums[0][name] + sums[1][name]) + sums[2][name]) + sums[3][name]
        np.testing.assert_array_equal(totals[name], right)  # to the bit
    assert total_counts.tolist() == [3.0, 12.0, 6.0, -2.0]
