"""Each audit is large enough to contradict its bug in nearly all repeats. If all guesses are right,
300 guesses on 4,096 canaries or 410 on 16,384 refute the claim's curve at p ≤ 0.001. With the noise
halved, 410 guesses at each end of 16,384 refute it in 20 of 20 simulated audits.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import tensorflow as tf

from dp_core.audit import engine_audit
from dp_core.audit.canaries import throw_coins
from dp_core.audit.one_run import AuditVerdict, Claim, Guesses, audit_claim
from dp_core.errors import BadInput
from dp_core.privacy.batch_selection import PoissonSampling
from dp_core.privacy.clipping import layer_rules
from dp_core.privacy.clipping.book_keeping import clipped_grad_sum
from dp_core.privacy.execution_plan import ExecutionPlan
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training import trainer

CANARIES = engine_audit.DiracCanaries(32)
COINS_OF, TRAINING = PrivacySeed.fixed("coins"), PrivacySeed.fixed("training")
EPSILON, DELTA = 4.0, 1e-5


@cache
def planned(count: int, sampling_rate: float, steps: int) -> tuple[ExecutionPlan, Claim]:
    plan = engine_audit.audited_plan(
        count, EPSILON, DELTA, sampling_rate=sampling_rate, steps=steps
    )
    return plan, Claim.of_event(plan.event(), DELTA)


def audited(
    guesses: Guesses,
    canaries: engine_audit.DiracCanaries = CANARIES,
    *,
    sampling_rate: float = 1.0,
    steps: int = 1,
    micro_rows: int = 512,
) -> AuditVerdict:
    plan, claim = planned(canaries.count, sampling_rate, steps)
    coins = throw_coins(COINS_OF, canaries.count)
    seen = engine_audit.white_box_observations(
        canaries, plan, coins, TRAINING, micro_rows=micro_rows
    )
    return audit_claim(claim, engine_audit.white_box_scores(plan, seen), coins, guesses, COINS_OF)


def test_every_canary_is_clipped_to_the_clip_norm_and_lies_in_its_own_entry():
    parameters = {n: tf.constant(a) for n, a in CANARIES.model().parameters.items()}
    for number in (3, 1024 + 40, 2 * 1024 + 77, 3 * 1024 + 1023):
        ids = tf.constant([[number]], tf.int32)
        clipped = clipped_grad_sum(
            lambda layers, ids=ids: CANARIES.row_losses(layers, None, ids), parameters, 1, 1.0
        )
        expected = 10.0 if number < 3 * 1024 else 10.0 * 2**0.5
        assert clipped.norms.numpy() == pytest.approx(expected, rel=1e-3)
        along = CANARIES.along({n: g.numpy() for n, g in clipped.sums.items()})
        assert along[number] == pytest.approx(1.0, rel=1e-3)
        assert np.abs(np.delete(along, number)).max() < 1e-6


def test_the_engine_is_consistent_and_the_audit_sees_something():
    plan, claim = planned(CANARIES.count, 0.5, 4)
    coins = throw_coins(COINS_OF, CANARIES.count)
    seen = engine_audit.white_box_observations(CANARIES, plan, coins, TRAINING)
    noise = seen[:, ~coins]  # the observations are the clipped sum plus the plan's noise
    assert noise.std() == pytest.approx(plan.noise_multiplier, rel=0.05)
    drawn = seen[:, coins].mean()
    spread = noise.std() / seen[:, coins].size ** 0.5
    assert drawn == pytest.approx(plan.sampling_rate(0), abs=6 * spread)
    scores = engine_audit.white_box_scores(plan, seen)
    verdict = audit_claim(claim, scores, coins, Guesses(100, 100), COINS_OF)
    assert verdict.word == "consistent"
    assert verdict.claim.epsilon == pytest.approx(EPSILON, rel=1e-3)
    assert 0.8 < verdict.lower_bounds["trade-off"] < EPSILON
    assert verdict.power["Gaussian"] > EPSILON
    assert verdict.sound


# --- planted bugs: each must be contradicted


def with_less_noise(monkeypatch, share):
    true = trainer.noised_means

    def noised(totals, noise, divisor):
        less = replace(noise, noise_multiplier=noise.noise_multiplier * share())
        return true(totals, less, divisor)

    monkeypatch.setattr(trainer, "noised_means", noised)


def test_half_the_noise(monkeypatch):
    with_less_noise(monkeypatch, lambda: 1 / 2)
    assert_contradicted(audited(Guesses(410, 410), engine_audit.DiracCanaries(64)))


def test_noise_per_shard_forgotten(monkeypatch):
    """Each of 16 shards should add noise of σ/√16, but only the chief does."""
    with_less_noise(monkeypatch, lambda: 1 / 4)
    assert_contradicted(audited(Guesses(200, 200)))


@pytest.mark.cases
def test_a_layer_unclipped(monkeypatch, record):
    rule = getattr(layer_rules, record)
    true = rule.gradients

    def without_norm(self, g):
        gradients = true(self, g)
        return replace(gradients, squared_norms=0.0 * gradients.squared_norms)

    monkeypatch.setattr(rule, "gradients", without_norm)
    assert_contradicted(audited(Guesses(400, 0)))


def test_accumulation_noise_counted_once(monkeypatch):
    """Each micro-batch of an update should add noise, but only the last one does."""
    micro_batches, add = [], trainer.Trainer.add

    def counted(self, batch):
        micro_batches.append(1)
        add(self, batch)

    def share():
        count = len(micro_batches)
        micro_batches.clear()
        return count**-0.5

    monkeypatch.setattr(trainer.Trainer, "add", counted)
    with_less_noise(monkeypatch, share)
    assert_contradicted(audited(Guesses(200, 200), micro_rows=128))  # 17 micro-batches


def test_a_sampler_that_draws_the_same_batch_every_time(monkeypatch):
    true = PoissonSampling.draw
    monkeypatch.setattr(
        PoissonSampling, "draw", lambda law, seed, n, rate, step: true(law, seed, n, rate, 0)
    )
    verdict = audited(Guesses(310, 0), engine_audit.DiracCanaries(46), sampling_rate=0.1, steps=20)
    assert_contradicted(verdict)


@pytest.mark.slow
def test_a_sampler_that_deals_batches_in_a_fixed_order(monkeypatch):
    def dealt(law, seed, n, rate, step):
        period = round(1 / rate)
        return np.arange(step % period, n, period)

    monkeypatch.setattr(PoissonSampling, "draw", dealt)
    audit = audited(Guesses(320, 0), engine_audit.DiracCanaries(64), sampling_rate=0.05, steps=200)
    assert_contradicted(audit)


def assert_contradicted(verdict):
    assert verdict.word == "contradicted"
    assert verdict.lower_bounds["Gaussian"] > EPSILON


# --- black box


def audited_weights(guesses: Guesses) -> AuditVerdict:
    canaries = engine_audit.NewTokenCanaries(1000, ordinary=64)
    coins = throw_coins(COINS_OF, canaries.count)
    plan = engine_audit.audited_plan(canaries.units, EPSILON, DELTA, sampling_rate=0.5, steps=6)
    scores = engine_audit.black_box_scores(canaries, plan, coins, TRAINING)
    claim = Claim.of_event(plan.event(), DELTA)
    return audit_claim(claim, [scores], coins, guesses, COINS_OF)


def test_released_weights_show_canaries_only_as_far_as_the_noise_allows():
    verdict = audited_weights(Guesses(150, 150))
    assert verdict.word == "consistent"
    assert verdict.lower_bounds["trade-off"] > 0.3


def test_without_noise_the_released_weights_give_every_canary_away(monkeypatch):
    monkeypatch.setattr(ExecutionPlan, "gradient_noise_multiplier", lambda plan: 0.05)
    assert_contradicted(audited_weights(Guesses(300, 0)))


# --- inputs


def test_canaries_that_do_not_fit_the_plan_are_refused():
    plan, _ = planned(CANARIES.count, 1.0, 2)
    coins = throw_coins(COINS_OF, CANARIES.count)
    with pytest.raises(BadInput, match="as many"):
        engine_audit.white_box_observations(engine_audit.DiracCanaries(2), plan, coins, TRAINING)
    with pytest.raises(BadInput, match="as many"):
        engine_audit.black_box_scores(engine_audit.NewTokenCanaries(5), plan, coins, TRAINING)
    with pytest.raises(BadInput, match="3 by 3"):
        engine_audit.DiracCanaries(3)
    assert engine_audit.DiracCanaries.at_least(1000).count >= 1000


def test_the_periodic_score_is_the_best_turn():
    seen = np.array([[1.0, 0.0], [0.0, 2.0], [1.0, 0.0], [0.0, -1.0]])
    assert engine_audit.periodic(seen, 2).tolist() == [2.0, 1.0]
