"""Reward models: what a classifier gives for a sample alone is its reward in any company."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

import tiny
from artifacts.store import Store
from artifacts.verification import verify
from scoring import commit_rollout, make_scorers, reward_file, rows_of, score
from stages.contract import StageError
from stages.score import run as stage
from stages.score.config import ScoreConfig
from stages.score.reward_model import Encoded, RewardModel
from stages.score.reward_model_spec import RewardModelJob, RewardModelSpec
from stages.score.rewards import reward_digests
from stages.score.scorers import RewardModels, Scorers
from stages.score.worker import ScorerSpec
from stages.workers import LocalCluster, Placement

TEXTS = ["yes", "no, not at all", "a", "seven is not ten", "ok then", "yes", "maybe so", "no"]
FLAKY = """
from pathlib import Path


def flaky(text, **row):
    if text == "a" and not Path(__file__).with_name("well").exists():
        raise ConnectionError("down")
    return 1.0
"""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "run"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_classifier(tmp_path_factory.mktemp("models") / "rm")


def config(folder: Path, *others: dict, **fields) -> ScoreConfig:
    return ScoreConfig(rewards=[{"model": str(folder), "name": "rm", **fields}, *others])


def load(folder: Path) -> torch.nn.Module:
    kind = transformers.AutoModelForSequenceClassification
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def alone(folder: Path, ids: list[int], label: int = 0) -> float:
    """What transformers gives for one sample, without padding."""
    with torch.no_grad():
        return load(folder)(torch.tensor([ids])).logits[0, label].item()


def encoded(text: str) -> list[int]:
    return tiny.tokenizer()(text)["input_ids"]


def in_batches(folder: Path, samples: list[list[int]], budget: int) -> list[float]:
    model = RewardModel(RewardModelSpec(model=str(folder), max_tokens_per_batch=budget))
    found: dict[int, float] = {}
    tokens = {n: Encoded(ids) for n, ids in enumerate(samples)}
    batches = model.batches(tokens)
    for batch in batches:
        longest = max(len(samples[n]) for n in batch)
        assert len(batch) == 1 or longest * len(batch) <= budget
        outcomes = model.values([tokens[n] for n in batch])
        found |= {n: outcome.value for n, outcome in zip(batch, outcomes, strict=True)}
    assert len(batches) > 1 or budget > 100
    return [found[n] for n in range(len(samples))]


@pytest.mark.parametrize(
    ("kind", "pad"),
    [("llama", 0), ("llama", None), ("llama", 2), ("llama", -1), ("gpt2", None), ("roberta", 0)],
)
def test_reward_is_that_of_the_sample_alone_whatever_the_padding(
    tmp_path: Path, kind: str, pad: int | None
) -> None:
    # Ends in the end token, which is the padding token too in one of the cases; pad -1 is none.
    samples = [[*encoded(text), 2] for text in TEXTS]
    made = tiny.save_classifier(tmp_path / "model", kind=kind, pad=pad)
    expected = [alone(made, ids) for ids in samples]
    assert max(expected) - min(expected) > 0.05
    for side in ("left", "right"):
        tokenizer = tiny.tokenizer()
        tokenizer.padding_side = side
        tokenizer.save_pretrained(made)
        for budget in (1, 40, 4096):
            assert in_batches(made, samples, budget) == pytest.approx(expected, abs=1e-5)


def test_plain_prompt_and_response_are_one_text_and_values_keep_their_samples(
    store: Store, folder: Path, tmp_path: Path
) -> None:
    path = reward_file(tmp_path, "def length(text, **row):\n    return len(text)\n")
    wanted = config(folder, {"fn": f"{path}:length"}, weight=2.0, max_tokens_per_batch=40)
    made = score(store, wanted, commit_rollout(store, TEXTS, 4), make_scorers(wanted))
    rows = rows_of(store, made)
    expected = [alone(folder, encoded(f"prompt {n // 2}{text}")) for n, text in enumerate(TEXTS)]
    assert [row["reward.rm"] for row in rows] == pytest.approx(expected, abs=1e-5)
    sums = [2 * value + len(text) for value, text in zip(expected, TEXTS, strict=True)]
    assert [row["reward"] for row in rows] == pytest.approx(sums, abs=1e-5)
    metrics = made.manifest.metrics
    assert metrics["reward/rm"] == pytest.approx(sum(expected) / len(expected), abs=1e-5)
    assert metrics["reward/rm_max"] == pytest.approx(max(expected), abs=1e-5)
    assert not verify(store).problems


def test_chat_template_is_the_reward_models_own(tmp_path: Path, store: Store) -> None:
    template = (
        "<bos>{% for m in messages %}{{ m['role'][0] }}-{{ m['content'] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}a-{% endif %}"
    )
    folder = tiny.save_classifier(tmp_path / "rm", chat_template=template)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}]
    wanted = config(folder)
    rollout = commit_rollout(store, TEXTS[:2], 2, messages=[json.dumps(messages), None])
    rows = rows_of(store, score(store, wanted, rollout, make_scorers(wanted)))
    texts = ["<bos>s-be brief<eos>u-1+1<eos>a-yes<eos>", f"<bos>u-prompt 0<eos>a-{TEXTS[1]}<eos>"]
    ids = [tiny.tokenizer()(text, add_special_tokens=False)["input_ids"] for text in texts]
    expected = [alone(folder, each) for each in ids]
    assert [each.count(1) for each in ids] == [1, 1]  # one begin token, which the template writes
    assert [row["reward.rm"] for row in rows] == pytest.approx(expected, abs=1e-5)


def test_pair_is_joined_as_the_tokenizer_joins_two_texts(tmp_path: Path, store: Store) -> None:
    folder = tiny.save_classifier(tmp_path / "rm", kind="bert")
    path = folder / "tokenizer_config.json"
    names = ["input_ids", "token_type_ids", "attention_mask"]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_input_names": names}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    wanted = config(folder, template="pair", max_tokens_per_batch=60)
    rollout = commit_rollout(store, TEXTS, 8)
    rows = rows_of(store, score(store, wanted, rollout, make_scorers(wanted)))
    model = load(folder)
    expected = []
    for n, text in enumerate(TEXTS):
        pair = tokenizer(f"prompt {n // 2}", text, return_tensors="pt")
        assert pair["token_type_ids"].sum() == len(text) + 1
        with torch.no_grad():
            expected.append(model(**pair).logits[0, 0].item())
    assert [row["reward.rm"] for row in rows] == pytest.approx(expected, abs=1e-5)
    plain = alone(folder, tokenizer("prompt 0", TEXTS[0])["input_ids"])
    assert rows[0]["reward.rm"] != pytest.approx(plain, abs=1e-3)  # which text it is of counts


def test_sample_longer_than_the_model_reads_is_an_error_and_is_not_cut(
    store: Store, folder: Path
) -> None:
    texts = ["short", "x" * 120, "y" * 118, "end"]  # <bos>, "prompt N", and 128 positions
    wanted = config(folder)
    rows = rows_of(
        store, score(store, wanted, commit_rollout(store, texts, 4), make_scorers(wanted))
    )
    assert [row["reward"] is None for row in rows] == [False, True, False, False]
    (record,) = json.loads(rows[1]["error"])
    assert (record["function"], record["type"]) == ("rm", "SampleTooLong")
    assert "have 129 tokens, and the reward model reads 1 to 128" in record["message"]
    assert rows[2]["reward"] == pytest.approx(
        alone(folder, encoded("prompt 1" + "y" * 118)), abs=1e-5
    )


def test_positions_that_count_from_the_padding_token_on_are_fewer(
    tmp_path: Path, store: Store
) -> None:
    folder = tiny.save_classifier(tmp_path / "rm", kind="roberta", pad=3)
    texts = ["x" * 116, "x" * 115]  # <bos>, "prompt 0", and 128 positions less 4
    wanted = config(folder)
    rows = rows_of(
        store, score(store, wanted, commit_rollout(store, texts, 2), make_scorers(wanted))
    )
    (record,) = json.loads(rows[0]["error"])
    assert "have 125 tokens, and the reward model reads 1 to 124" in record["message"]
    assert rows[1]["reward"] == pytest.approx(alone(folder, encoded(f"prompt 0{texts[1]}")))


def test_retry_of_errors_reads_those_samples_alone(
    store: Store, folder: Path, tmp_path: Path
) -> None:
    path = reward_file(tmp_path, FLAKY)
    wanted = config(folder, {"fn": f"{path}:flaky"})
    rollout, pool = commit_rollout(store, TEXTS, 4), make_scorers(wanted)
    before = rows_of(store, score(store, wanted, rollout, pool))
    assert [n for n, row in enumerate(before) if row["error"]] == [2]
    assert before[2]["reward.rm"] is not None
    (tmp_path / "well").touch()
    after = rows_of(store, score(store, wanted, rollout, pool, stage.retry_errors))
    assert [row["error"] for row in after] == [None] * len(TEXTS)
    assert after[2]["reward.rm"] == pytest.approx(before[2]["reward.rm"], abs=1e-5)
    assert after[2]["reward"] == pytest.approx(before[2]["reward.rm"] + 1, abs=1e-5)
    del before[2], after[2]
    assert after == before


def test_label_chooses_one_of_several_outputs(tmp_path: Path, store: Store) -> None:
    folder = tiny.save_classifier(tmp_path / "rm", labels=3)
    wanted = config(folder, label="LABEL_2")
    rows = rows_of(
        store, score(store, wanted, commit_rollout(store, TEXTS[:2], 2), make_scorers(wanted))
    )
    assert rows[0]["reward"] == pytest.approx(alone(folder, encoded("prompt 0yes"), 2), abs=1e-5)


def test_number_that_is_not_finite_is_an_error(tmp_path: Path, store: Store) -> None:
    model = tiny.classifier()
    torch.nn.init.constant_(model.score.weight, float("inf"))
    model.save_pretrained(tmp_path / "rm")
    tiny.tokenizer().save_pretrained(tmp_path / "rm")
    wanted = ScoreConfig(rewards=[{"model": str(tmp_path / "rm")}], max_error_share=1.0)
    made = score(store, wanted, commit_rollout(store, TEXTS[:2], 2), make_scorers(wanted))
    rows = rows_of(store, made)
    assert [row["reward"] for row in rows] == [None, None]
    assert "a reward is finite" in rows[0]["error"]


def test_weights_that_lack_a_part_are_refused_and_not_drawn(tmp_path: Path, store: Store) -> None:
    folder = tiny.save_classifier(tmp_path / "rm")
    weights = tiny.classifier().state_dict()
    del weights["model.layers.1.mlp.up_proj.weight"]
    from safetensors.torch import save_file

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    wanted = config(folder)
    with pytest.raises(StageError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        score(store, wanted, commit_rollout(store, TEXTS[:2], 2), make_scorers(wanted))


def test_digest_follows_weights_and_tokenizer_and_not_the_folder(tmp_path: Path) -> None:
    def digest(name: str, change=lambda folder: None, **options) -> str:
        folder = tiny.save_classifier(tmp_path / name, **options)
        change(folder)
        return reward_digests([RewardModelSpec(model=str(folder), name="rm")])["rm"]

    def other_weights(folder: Path) -> None:
        model = tiny.classifier()
        torch.nn.init.ones_(model.score.weight)
        model.save_pretrained(folder)

    first = digest("one")
    assert digest("two") == first
    assert digest("three", other_weights) != first
    assert digest("four", chat_template="{{ messages }}") != first


def test_folder_with_other_files_than_the_key_names_is_not_read(
    tmp_path: Path, store: Store
) -> None:
    wanted = config(tiny.save_classifier(tmp_path / "rm"))
    spec = ScorerSpec(wanted.rewards, None, "", 1, True, digests={"rm": "0" * 64})
    pool = Scorers(LocalCluster(), spec, Placement())
    with pytest.raises(StageError, match="holds other files than when the run began"):
        score(store, wanted, commit_rollout(store, TEXTS[:2], 2), pool)


def test_one_set_of_workers_serves_all_that_ask_a_reward_model(folder: Path) -> None:
    job = RewardModelJob(RewardModelSpec(model=str(folder)))
    models = RewardModels(LocalCluster(), 2, Placement())
    assert models.crew(job) is models.crew(replace(job))
    assert models.crew(job) is not models.crew(replace(job, digest="0" * 64))


def test_failing_batch_is_named_with_device_and_sample(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self, batch) -> None:
        raise RuntimeError("out of memory")

    wanted = config(folder)
    pool = make_scorers(wanted)
    monkeypatch.setattr(RewardModel, "values", fails)
    with pytest.raises(StageError) as caught:
        score(store, wanted, commit_rollout(store, TEXTS[:2], 2), pool)
    assert str(caught.value) == (
        "reward model rm-0 failed on cpu, shard 0, sample 000001-00000-001 and 1 more (reward rm, "
        "up to 23 tokens each): out of memory"
    )
