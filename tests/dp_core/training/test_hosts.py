"""A training on 1, 2 and 4 hosts: one set of weights, one noise, one count of everybody.

The hosts are threads here; tests/tasks/test_training_hosts.py has them as processes, and kills one.
"""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
from host_threads import Cast, close_links, on_hosts
from noised_updates import assert_gaussian, flat

from dp_core.config.training import TrainingConfig
from dp_core.errors import BadInput, ConfideError, Unfinished
from dp_core.models.config import FeedForwardConfig, Gpt2Config, LlamaConfig
from dp_core.privacy.accounting.noise_bands import with_bands
from dp_core.privacy.execution_plan import AdaptiveClipping
from dp_core.privacy.matrix_factorization import Workload
from dp_core.privacy.noise_addition import noised_means
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training import trainer as trainer_module
from dp_core.training.checkpoints import LocalFolder
from dp_core.training.hosts import _CONFIGS, _END, Hosts, rows_digest, share
from dp_core.training.links import Link
from dp_core.training.loop import OrdinaryUpdates, PrivateUpdates, pretrain
from dp_core.training.objectives import Objective, masked_lm

STEPS, SIGMA, CLIP, BATCH = 2, 0.7, 0.5, 9
SEED = PrivacySeed.fixed(4)


class Recorded:
    """What the chief of a training has seen."""

    def __init__(self):
        self.sums, self.noised, self.noise, self.points = [], [], [], []

    def noised_means(self, totals, noise, divisor):
        means = noised_means(totals, noise, divisor)
        self.sums.append({name: np.array(total) for name, total in totals.items()})
        self.noised.append({name: np.array(mean) for name, mean in means.items()})
        self.noise.append(noise)
        assert divisor == BATCH
        return means


@pytest.fixture(scope="module")
def trained(store, config, plan_of, config_of, tmp_path_factory):
    """Train on 1, 2 and 4 hosts; on two, it is stopped after each update."""
    plan, runs = plan_of(steps=STEPS, noise_multiplier=SIGMA, clip_norm=CLIP), {}
    for count in (1, 2, 4):
        seen, folder = Recorded(), tmp_path_factory.mktemp("checkpoints")
        box = 1e-9 if count == 2 else 0.0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer_module, "noised_means", seen.noised_means)
            done = False
            while not done:
                with on_hosts(count, store) as hosts:
                    try:
                        model = pretrain(
                            model=config,
                            store=store,
                            updates=PrivateUpdates(plan, SEED, b"manifest"),
                            config=config_of(time_box_minutes=box),
                            init_seed=1,
                            checkpoints=LocalFolder(folder),
                            device="cpu",
                            progress=seen.points.append,
                            hosts=hosts,
                        )
                        done = True
                    except Unfinished:
                        pass
        seen.weights = model.parameters
        runs[count] = seen
    return runs


def test_weights_agree_to_rounding(trained):
    one = flat(trained[1].weights)
    for count in (2, 4):
        other = flat(trained[count].weights)
        np.testing.assert_allclose(other, one, atol=2e-6)
    assert np.abs(one).max() > 0.01


def test_sums_are_those_of_one_host_and_not_of_one_host_s_units(trained):
    for count in (2, 4):
        assert len(trained[count].sums) == STEPS
        for one, other in zip(trained[1].sums, trained[count].sums, strict=True):
            assert np.linalg.norm(flat(one)) > CLIP
            np.testing.assert_allclose(flat(other), flat(one), atol=2e-5)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_noise_is_added_once_whatever_the_number_of_hosts(trained, count):
    """Noised mean less noiseless mean: σ·C / B, not √n times that; and the same for all n."""
    seen = trained[count]
    sample = np.concatenate(
        [
            flat(noised) - flat(sums) / BATCH
            for noised, sums in zip(seen.noised, seen.sums, strict=True)
        ]
    )
    right = SIGMA * CLIP / BATCH
    assert len(sample) > 6000
    assert_gaussian(sample, right, (1 / np.sqrt(2), np.sqrt(2), 2.0))  # by two hosts, or four
    for mine, alone in zip(seen.noised, trained[1].noised, strict=True):
        np.testing.assert_allclose(flat(mine), flat(alone), atol=1e-6)
    assert [noise.t for noise in seen.noise] == list(range(STEPS))


def test_every_unit_is_counted_once(trained):
    def points(count):
        last = {point.update: point for point in trained[count].points if point.at_point}
        return [last[update] for update in sorted(last)]

    for count in (2, 4):
        assert len(points(count)) == STEPS
        for one, other in zip(points(1), points(count), strict=True):
            assert (other.update, other.batch, other.clipped) == (
                one.update,
                one.batch,
                one.clipped,
            )
            assert other.loss == pytest.approx(one.loss, rel=1e-5)
            assert other.clip_norm == one.clip_norm
    assert sum(point.batch for point in points(1)) > 2 * STEPS


def run(store, config, folder, updates, training, count, device="cpu", **more):
    """Train a small model; return weights and what was reported at the points."""
    told = []
    with on_hosts(count, store) as hosts:
        model = pretrain(
            model=config, store=store, updates=updates(), config=training, init_seed=1,
            checkpoints=LocalFolder(folder / str(count)), device=device, progress=told.append,
            hosts=hosts, **more,
        )  # fmt: skip
    return flat(model.parameters), [(p.update, p.batch, p.clipped, p.clip_norm) for p in told]


def test_clipping_that_learns_averages_adapters_and_several_devices(
    store, config, plan_of, tmp_path
):
    """Each of two hosts has two logical devices: the shape of a program on TPU slices."""
    plan = plan_of(steps=2, adaptive=AdaptiveClipping(0.5, 2.0))
    training = TrainingConfig(
        learning_rate=0.01, micro_rows=8, averaging="exponential", noise_floor=1.0,
        trained_parameters="lora", lora_rank=2, whole_words=True,
    )  # fmt: skip
    words = np.zeros(store.vocabulary_size, np.bool_)
    words[7::2] = True
    one, two = (
        run(
            store, config, tmp_path, lambda: PrivateUpdates(plan, SEED, b"m"), training, count,
            device, continuation=words,
        )
        for count, device in ((1, "cpu"), (2, "mock-tpu:2"))
    )  # fmt: skip
    np.testing.assert_allclose(two[0], one[0], atol=2e-6)
    assert two[1] == one[1]  # counts and learned clip norms, exactly
    assert len({clip_norm for *_, clip_norm in one[1]}) == 2


def test_correlated_noise_goes_on_over_updates(store, config, plan_of, config_of, tmp_path):
    plan = plan_of(steps=3)
    plan = with_bands(plan, 2, Workload.prefix_sums(3))
    one, two = (
        run(store, config, tmp_path, lambda: PrivateUpdates(plan, SEED, b"m"), config_of(), count)
        for count in (1, 2)
    )
    np.testing.assert_allclose(two[0], one[0], atol=2e-6)
    assert two[1] == one[1]


def test_training_without_privacy(store, config, config_of, tmp_path):
    one, two = (
        run(store, config, tmp_path, lambda: OrdinaryUpdates(2, 13, 0), config_of(), count)
        for count in (1, 2)
    )
    np.testing.assert_allclose(two[0], one[0], atol=2e-5)
    assert two[1] == one[1]
    assert {batch for _, batch, *_ in two[1]} == {13}


# --- what helpers are told


class Line:
    """A link that keeps what is sent."""

    def __init__(self):
        self.sent = []

    def send(self, kind, body):
        self.sent.append(bytes(body))

    def receive(self):
        raise ConfideError("nobody is there")

    def close(self):
        pass


def test_a_helper_is_told_no_seed_and_nothing_that_it_could_draw_noise_from(
    store, config, plan_of, config_of
):
    plan, line = plan_of(), Line()
    updates = PrivateUpdates(plan, SEED, b"manifest")
    trainer = SimpleNamespace(
        clipper=updates.clipper(), config=config, names=["w"],
        weights=lambda: {"w": np.ones((2, 2), np.float32)},
    )  # fmt: skip
    batches = updates.batches(
        store, micro_rows=8, devices=1, examples=masked_lm().examples, hosts=2
    )
    hosts = Hosts(2, line, {})
    hosts.assign(trainer, masked_lm(), batches, store=store, device="cpu", precision="float32")
    hosts.tell_drawn(0, batches.draw(0))
    head = json.loads(line.sent[0])
    assert sorted(head) == [
        "arrays", "batches", "clipper", "device", "digests", "frozen", "model", "precision",
        "rows", "trained", "whole_words",
    ]  # fmt: skip
    assert sorted(head["batches"]) == ["coins", "kind", "least", "maskings", "rows", "units"]
    assert head["digests"] == [rows_digest(store, share(1, 2, store.n_units))]
    said = b"".join(line.sent)
    secret = SEED._secret
    for never in (secret, SEED.derive("noise", b"manifest", 0, "w"), b"manifest"):
        assert never not in said
        assert never.hex().encode() not in said
    assert SEED.derive("sampling", "poisson", 0)[:16] not in said


def test_other_rows_than_the_chief_s_are_refused_by_who_has_them(
    store, config, plan_of, config_of, tmp_path
):
    import dataclasses

    changed = store.tokens.copy()
    changed[-1, 1] += 1  # of the last unit, which is host 1's
    other = dataclasses.replace(store, tokens=changed)
    cast = Cast(2, lambda number: other)
    with pytest.raises(BadInput, match="host 1: the rows are not those of the first host"):
        pretrain(
            model=config, store=store, updates=PrivateUpdates(plan_of(), SEED, b"m"),
            config=config_of(), init_seed=1, checkpoints=LocalFolder(tmp_path / "kept"),
            device="cpu", progress=lambda p: None, hosts=cast.hosts,
        )  # fmt: skip
    cast.hosts.end()
    cast.join()
    assert isinstance(cast.raised[1], BadInput)


def test_that_it_is_over_reaches_the_last_host_however_slowly_it_is_passed_on(store, monkeypatch):
    """A host that is told so closes its links: not before the next one is told as well."""
    sent = Link.send

    def slowly(link, kind, body):
        if kind == _END and link is not cast.hosts._link:
            time.sleep(0.3)
        sent(link, kind, body)

    monkeypatch.setattr(Link, "send", slowly)
    cast = Cast(4, lambda number: store)
    cast.hosts.end()
    cast.join()
    close_links()
    assert cast.raised == {}


def test_an_objective_that_helpers_do_not_know_is_refused(store, config):
    hosts = Hosts(2, Line(), {})
    trainer = SimpleNamespace(clipper=None, config=config, names=[], weights=dict)
    theirs = Objective("tagging", masked_lm().examples, masked_lm().row_losses)
    with pytest.raises(BadInput, match="tagging is trained on one host"):
        hosts.assign(trainer, theirs, None, store=store, device="cpu", precision="float32")


@pytest.mark.parametrize(
    "config_of_kind",
    [
        LlamaConfig.of_size(vocab_size=40, hidden=64, layers=1, max_positions=16),
        Gpt2Config.of_size(vocab_size=40, hidden=64, layers=1, max_positions=16),
        FeedForwardConfig(40, 16, 4, (12, 8), max_positions=16),
    ],
)
def test_every_model_s_shape_arrives_as_it_was_sent(config, config_of_kind):
    for shape in (config, config_of_kind):
        told = json.loads(json.dumps([type(shape).__name__, shape.to_hf()]))
        assert _CONFIGS[told[0]].from_hf(told[1]) == shape
