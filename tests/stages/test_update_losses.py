"""Losses by configuration alone: from committed scores to a committed policy, in one process."""

import pytest

import handmade
import tiny
from artifacts.keys import source_digest
from artifacts.store import Store
from stages.update import run as update_stage
from stages.update.config import UpdateConfig
from stages.update.trainer_spec import TrainerSpec
from stages.update.trainers import Trainers
from stages.user_code import load_function
from stages.workers import LocalCluster, Placement

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny.save_model(tmp_path_factory.mktemp("model"), layers=1))


def updated(folder, store, config, iterations=1):
    """Committed updates, each of samples that are alike."""
    spec = TrainerSpec(folder, config, "drop_sample", 0.8, 9, "float32")
    trainers, history = Trainers(LocalCluster(), spec, 1, Placement()), []
    for iteration in range(1, iterations + 1):
        rollout, scores = handmade.commit_iteration(store, iteration, seed=1)
        policy = history[-1].ref if history else rollout.manifest.inputs["policy"]
        work = update_stage.update_work(
            iteration,
            config,
            "drop_sample",
            0.8,
            9,
            [(rollout.ref, scores.ref)],
            policy,
            update_stage.function_digests(config),
        )
        history.append(
            update_stage.run(
                store,
                work,
                list(history),
                rollout.manifest.rows,
                lambda: trainers,
                lambda **_: None,
            )
        )
    return history


def config_of(**values):
    return UpdateConfig(**{"dtype": "float32", "lr": 1e-3, "max_tokens_per_rank": 60, **values})


def test_dpo_over_iterations_learns_the_preferences_of_the_scores(folder, tmp_path):
    history = updated(folder, Store(str(tmp_path)), config_of(loss="dpo", minibatches=2), 6)
    metrics = [update.manifest.metrics for update in history]
    # Every group with any spread makes one pair.
    assert metrics[0]["update/trained_samples"] % 2 == 0
    assert metrics[0]["update/trained_samples"] >= 6
    losses = [m["update/loss"] for m in metrics]
    assert losses == sorted(losses, reverse=True)
    assert metrics[-1]["update/preference_accuracy"] == 1


@pytest.mark.parametrize(
    "values",
    [
        {"algorithm": "gspo", "correction": "mis", "correction_level": "sequence"},
        {"algorithm": "dr_grpo", "entropy_coef": 0.01, "correction": "tis"},
        {"algorithm": "cispo", "kl_coef": 0.1, "kl_estimator": "k3_weighted"},
    ],
    ids=lambda values: values["algorithm"],
)
def test_algorithm_by_name_trains_and_logs_what_it_did(folder, tmp_path, values):
    (update,) = updated(folder, Store(str(tmp_path)), config_of(minibatches=2, **values))
    metrics = update.manifest.metrics
    assert metrics["update/grad_norm"] > 0
    share = {"mis": "mismatch/masked_share", "tis": "mismatch/clipped_share"}
    named = share.get(values.get("correction"), "update/clipped_share")
    assert 0 <= metrics[named] <= 1
    assert 0 < metrics["mismatch/effective_sample_size"] <= 1


def test_users_loss_enters_the_updates_key_by_its_source(folder, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from stages.update.loss_inputs import TokenLoss\n"
        "def mine(inputs, config):\n"
        "    return TokenLoss(-inputs.advantages_N * inputs.logprobs_N)\n"
    )
    mine, builtin = config_of(loss=f"{path}:mine"), config_of(loss="reinforce")
    (update,) = updated(folder, Store(str(tmp_path / "mine")), mine)
    (same,) = updated(folder, Store(str(tmp_path / "builtin")), builtin)
    digest = source_digest(load_function(f"{path}:mine", "loss"))
    assert update.manifest.functions == {"loss": digest}
    assert update.manifest.key != same.manifest.key
    # One's own trains on samples without advantage too, which here adds 0 to all sums.
    norms = [u.manifest.metrics["update/grad_norm"] for u in (update, same)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_metrics_of_an_iteration_are_means_over_the_steps_that_measured_them():
    steps = [
        {"step": 1, "update/skipped_steps": 1.0, "update/trained_tokens": 0.0},
        {"step": 2, "update/skipped_steps": 0.0, "update/trained_tokens": 8.0, "update/loss": 0.5},
    ]
    means = update_stage.step_means(steps)
    assert means["update/loss"] == 0.5
    assert means["update/skipped_steps"] == 1
    assert means["update/trained_tokens"] == 8
