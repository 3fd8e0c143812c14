"""Committed scores to committed advantages: through the store, the trainer and the update's key."""

import numpy as np
import pyarrow as pa
import pytest
import torch

import handmade
import tiny
from artifacts.errors import IntegrityError
from artifacts.manifests import Ref
from artifacts.shards import read_shard
from artifacts.store import Store
from stages.contract import StageError
from stages.update import run as update_stage
from stages.update.config import UpdateConfig
from stages.update.microbatch import MicroBatch
from stages.update.samples import read_samples
from stages.update.shaping import next_kl_coef
from stages.update.trainer_spec import TrainerSpec
from stages.update.trainers import Trainers
from stages.workers import LocalCluster, Placement

TRAINED = {"lr": 1e-3, "dtype": "float32", "max_tokens_per_rank": 40}
LENGTH = """
def length(batch):
    return batch.per_sample(batch.sampled_lengths() - 2.5)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny.save_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path / "run"))


def work_of(iteration, config, rollout, scores, history=()):
    before = history[-1] if history else None
    policy = before.ref if before else rollout.manifest.inputs["policy"]
    functions = update_stage.function_digests(config)
    return update_stage.update_work(
        iteration,
        config,
        "drop_sample",
        1.0,
        9,
        [(rollout.ref, scores.ref)],
        policy,
        functions,
        before,
    )


def train(store, folder, config, iterations, history=(), **options):
    """Updates over handmade iterations, going on from ``history``, by a trainer of its own."""
    spec = TrainerSpec(folder, config, "drop_sample", 1.0, 9, "float32")
    trainers = Trainers(LocalCluster(), spec, 1, Placement())
    made = list(history)
    for iteration in range(len(made) + 1, iterations + 1):
        rollout, scores = handmade.commit_iteration(store, iteration, groups=3, **options)
        work = work_of(iteration, config, rollout, scores, made)
        made.append(
            update_stage.run(store, work, list(made), 12, lambda: trainers, lambda **_: None)
        )
    return made


def advantages_of(store, update):
    return read_shard(store, update.folder, update.manifest.shards[0]).to_pylist()


def give_token_rewards(scores):
    for n, row in enumerate(scores):
        # The sampler's log-probs are as many as the tokens, and the reference's are too.
        row["token_rewards"] = [0.25 * (n % 3)] * len(row["reference_logprobs"]) if n else None


def test_token_rewards_are_carried_from_the_scores_to_each_token(store):
    rollout, scores = handmade.commit_iteration(store, 1, nulls=1, change=give_token_rewards)
    config = UpdateConfig(advantage="reinforce")
    samples = read_samples(store, handmade.inputs_of(rollout, scores), config, "drop_sample")
    rewards = pa.concat_tables(
        read_shard(store, scores.folder, shard) for shard in scores.manifest.shards
    )["reward"].to_pylist()
    for n, (row, reward) in enumerate(zip(samples.advantages, rewards, strict=True)):
        steps = np.arange(len(row), 0, -1)
        expected = (
            np.zeros(len(row)) if reward is None else reward + 0.25 * (n % 3 * (n > 0)) * steps
        )
        np.testing.assert_allclose(row, expected, atol=1e-12)


def test_samples_of_another_model_than_the_one_to_be_updated_are_refused(store):
    rollout, scores = handmade.commit_iteration(store, 1)
    inputs = {**handmade.inputs_of(rollout, scores), "policy": Ref("model", "1" * 64)}
    with pytest.raises(IntegrityError) as refused:
        read_samples(store, inputs, UpdateConfig(), "drop_sample")
    assert (refused.value.expected, refused.value.found) == ("1" * 64, "0" * 64)
    assert refused.value.path == rollout.folder


def test_microbatch_gives_each_token_its_own_advantage(store):
    rollout, scores = handmade.commit_iteration(store, 1, change=give_token_rewards)
    config = UpdateConfig(advantage="reinforce_pp")
    samples = read_samples(store, handmade.inputs_of(rollout, scores), config, "drop_sample")
    members = [7, 2, 4]
    batch = MicroBatch.of(samples, members, None, torch.device("cpu"))
    expected = np.concatenate([samples.advantages[i] for i in members]).astype(np.float32)
    assert len(set(expected)) > 3
    assert batch.advantages_N.tolist() == expected.tolist()


def test_scores_of_a_version_without_token_rewards_still_read(store, monkeypatch):
    def without(rewards):
        schema = handmade_schema(rewards)
        return schema.remove(schema.get_field_index("token_rewards"))

    handmade_schema = handmade.scores_schema
    monkeypatch.setattr(handmade, "scores_schema", without)
    rollout, scores = handmade.commit_iteration(store, 1)
    samples = read_samples(
        store, handmade.inputs_of(rollout, scores), UpdateConfig(), "drop_sample"
    )
    assert any(row.any() for row in samples.advantages)


@pytest.mark.parametrize(
    ("column", "value", "what"),
    [
        ("reward", float("nan"), "reward: .*NaN or an infinity"),
        ("reward", float("-inf"), "reward: .*NaN or an infinity"),
        ("token_rewards", [float("nan")] * 99, "token_rewards: .*another count"),
        ("token_rewards", "nan", "token_rewards: .*NaN or an infinity"),
        ("reference_logprobs", [0.5] * 99, "reference_logprobs: .*another count"),
    ],
)
def test_scores_that_do_not_fit_their_rollout_are_refused(store, column, value, what):
    def spoil(scores):
        give_token_rewards(scores)
        is_nan = value == "nan"
        scores[3][column] = [float("nan")] * len(scores[3][column]) if is_nan else value

    rollout, scores = handmade.commit_iteration(store, 1, change=spoil)
    with pytest.raises(IntegrityError) as refused:
        read_samples(store, handmade.inputs_of(rollout, scores), UpdateConfig(), "drop_sample")
    for part in what.split(": .*"):
        assert part in str(refused.value)


def test_user_estimator_by_path_decides_the_committed_advantages(store, folder, tmp_path):
    (tmp_path / "mine.py").write_text(LENGTH)
    config = UpdateConfig(advantage=f"{tmp_path}/mine.py:length", **TRAINED)
    (update,) = train(store, folder, config, 1, nulls=1)
    assert update.manifest.functions.keys() == {"advantage"}
    assert update.manifest.identity["advantage"] == ":length"
    rollout, scores = handmade.commit_iteration(store, 1, groups=3, nulls=1)
    samples = read_samples(store, handmade.inputs_of(rollout, scores), config, "drop_sample")
    rows = advantages_of(store, update)
    expected = [len(response) - 2.5 for _, response in samples.sequences[:-1]]
    assert [row["advantage"] for row in rows] == [*expected, None]
    # One number a sample is told once.
    assert {str(row["token_advantages"]) for row in rows} == {"None"}
    assert update.manifest.metrics["update/trained_samples"] == 11
    assert update.manifest.metrics["update/advantage_min"] == min(expected)


def test_update_key_follows_the_source_of_a_user_estimator_and_not_its_place(store, tmp_path):
    rollout, scores = handmade.commit_iteration(store, 1)

    def key(place, source):
        place.mkdir()
        (place / "mine.py").write_text(source)
        config = UpdateConfig(advantage=f"{place}/mine.py:length")
        return work_of(1, config, rollout, scores).key

    here = key(tmp_path / "here", LENGTH)
    assert key(tmp_path / "there", LENGTH) == here
    assert key(tmp_path / "changed", LENGTH.replace("2.5", "2.0")) != here
    assert work_of(1, UpdateConfig(), rollout, scores).key != here


def test_replay_with_a_user_estimator_takes_the_source_that_was_or_none(store, folder, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(LENGTH)
    config = UpdateConfig(advantage=f"{mine}:length", **TRAINED)
    history = train(store, folder, config, 2)
    # The run goes on with another estimator; its past is still made by this one.
    spec = TrainerSpec(folder, UpdateConfig(**TRAINED), "drop_sample", 1.0, 9, "float32")
    assert Trainers(LocalCluster(), spec, 1, Placement()).bring_to(store, history) == 2
    mine.write_text(LENGTH.replace("2.5", "2.0"))
    with pytest.raises(StageError, match=r"update.advantage .*mine.py:length has another source"):
        Trainers(LocalCluster(), spec, 1, Placement()).bring_to(store, history)
    mine.unlink()
    with pytest.raises(StageError, match=r"has another source|does not exist"):
        Trainers(LocalCluster(), spec, 1, Placement()).bring_to(store, history)


def test_user_estimator_named_like_one_of_ours_is_still_the_users(store, folder, tmp_path):
    (tmp_path / "own.py").write_text(LENGTH.replace("def length", "def grpo"))
    history = train(store, folder, UpdateConfig(advantage=f"{tmp_path}/own.py:grpo", **TRAINED), 1)
    ours = train(Store(str(tmp_path / "ours")), folder, UpdateConfig(**TRAINED), 1)
    assert history[0].manifest.key != ours[0].manifest.key
    assert advantages_of(store, history[0])[0]["advantage"] % 1 == 0.5


def test_user_estimator_that_returns_something_else_ends_the_update_in_a_sentence(
    store, folder, tmp_path
):
    (tmp_path / "wrong.py").write_text("def wrong(batch):\n    return batch.rewards_S\n")
    config = UpdateConfig(advantage=f"{tmp_path}/wrong.py:wrong", **TRAINED)
    with pytest.raises(StageError, match=r"wrong.py:wrong returned a ndarray"):
        train(store, folder, config, 1)


def test_token_level_advantages_are_committed_token_by_token(store, folder):
    config = UpdateConfig(advantage="reinforce_pp", reward_kl_coef=0.1, **TRAINED)
    (update,) = train(store, folder, config, 1, nulls=1)
    rollout, scores = handmade.commit_iteration(store, 1, groups=3, nulls=1)
    samples = read_samples(store, handmade.inputs_of(rollout, scores), config, "drop_sample")
    rows = advantages_of(store, update)
    for row, tokens in zip(rows[:-1], samples.advantages, strict=False):
        if len(tokens) > 1:
            assert row["token_advantages"] == tokens.tolist()
        assert row["advantage"] == pytest.approx(tokens.mean(), abs=1e-12)
    assert rows[-1]["advantage"] is None
    assert rows[-1]["token_advantages"] is None
    # The handmade reference is 0.1 below the sampler, for every token.
    lengths = [len(tokens) for tokens in samples.advantages[:-1]]
    kl = update.manifest.metrics["update/reward_kl"]
    assert kl == pytest.approx(0.1 * np.mean(lengths), abs=1e-5)


def test_adaptive_kl_coefficient_goes_on_from_what_is_committed(folder, tmp_path):
    config = UpdateConfig(
        advantage="reinforce",
        reward_kl_coef=0.1,
        reward_kl_target=0.4,
        reward_kl_horizon=100,
        **TRAINED,
    )
    whole = train(Store(str(tmp_path / "whole")), folder, config, 3)
    coefs = [update.manifest.identity["reward_kl_coef"] for update in whole]
    assert coefs[0] == 0.1
    for n, update in enumerate(whole):
        kl = update.manifest.metrics["update/reward_kl"]
        following = next_kl_coef(coefs[n], kl, 0.4, 100, 12)
        assert update.manifest.outcome["next_reward_kl_coef"] == following
        assert update.manifest.metrics["update/reward_kl_coef"] == coefs[n]
        assert following != coefs[n]
        assert n == 2 or coefs[n + 1] == following
    # Another process: what it knows is what lies in the store.
    store = Store(str(tmp_path / "resumed"))
    train(store, folder, config, 1)
    found = train(store, folder, config, 1)
    assert found[0].was_reused
    resumed = train(store, folder, config, 3, history=found)
    assert [u.manifest.digest for u in resumed] == [u.manifest.digest for u in whole]


def test_batch_in_which_all_is_dropped_takes_no_step_and_says_so(store, folder):
    def equal(scores):
        for row in scores:
            row["reward"] = 1.0

    for fields in ({"zero_spread": "drop"}, {"zero_spread": "drop", "kl_coef": 0.1}):
        config = UpdateConfig(**fields, **TRAINED)
        (update,) = train(store, folder, config, 1, change=equal)
        metrics = update.manifest.metrics
        assert metrics["update/skipped_steps"] == 1
        assert metrics["update/zero_spread_groups"] == 3
        assert metrics["update/left_out_samples"] == 12
        assert metrics["update/advantage_mean"] is None
        assert {row["advantage"] for row in advantages_of(store, update)} == {None}
