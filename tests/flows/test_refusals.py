"""Bad input: one plain sentence with the value and the remedy, exit 2, before anything heavy."""

import json
import subprocess
import sys

import pytest
import yaml

import tiny
from flows.cli import main

HEAVY = ("torch", "vllm", "ray", "mlflow", "prefect", "transformers")
# Folders that no critic is made from.
MODELS = {
    "verdicts": {
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": {"0": "bad", "1": "fair", "2": "good"},
    },
    "encoder": {"architectures": ["BertModel"]},
    "narrow": {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64},
    # Nor a policy that reads sequences packed end to end.
    "windowed": {"sliding_window": 4096},
    "capped": {"attn_logit_softcapping": 50.0},
    "sunk": {"model_type": "gpt_oss", "layer_types": ["sliding_attention", "full_attention"]},
    "linear": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "recurrent": {"mamba_d_state": 16},
    "forgetful": {"attention_dropout": 0.1},
    "stretched": {"rope_scaling": {"rope_type": "longrope"}},
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals")
    tiny.save_model(folder / "model")
    tiny.save_prompts(folder / "data.jsonl")
    (folder / "rewards.py").write_text("def fine(text, **row):\n    return 0.0\n")
    (folder / "broken.py").write_text("import nothing_of_that_name\n")
    (folder / "bad.jsonl").write_text('{"prompt": "1", "answer": "1"}\n{"prompt": \n')
    (folder / "lean.jsonl").write_text('{"question": "1", "answer": "1"}\n')
    (folder / "chat.jsonl").write_text('{"prompt": [{"role": "user"}], "answer": "1"}\n')
    (folder / "number.jsonl").write_text('{"prompt": 3, "answer": "1"}\n')
    (folder / "list.jsonl").write_text("[1, 2]\n")
    (folder / "empty").mkdir()
    for name, values in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(values))
    config = {
        "model": "model",
        "iterations": 1,
        "data": {"path": "data.jsonl", "template": "plain", "batch_size": 8},
        "rollout": {"max_new_tokens": 8},
        "score": {"rewards": [{"fn": "rewards.py:fine"}]},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    (folder / "list.yaml").write_text("- 1\n")
    (folder / "broken.yaml").write_text("a: [1\n")
    return folder


def ratchet(bench, monkeypatch, capsys, *args):
    monkeypatch.chdir(bench)
    monkeypatch.setattr(sys, "argv", ["ratchet", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, capsys.readouterr()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("update.learning_rate=1", "there is no key 'update.learning_rate'"),
        ("update.clip_hihg=0.3", "did you mean 'clip_high'?"),
        ("rolout.temperature=1", "did you mean 'rollout'?"),
        ("update.lr=fast", "update.lr is 'fast'"),
        ("update.lr=-1", "update.lr is -1: input should be greater than 0"),
        ("update.algorithm=gppo", "update.algorithm is 'gppo'"),
        ("rollout.top_p=1.5", "rollout.top_p is 1.5"),
        ("rollout.max_rounds=0", "rollout.max_rounds is 0"),
        ("rollout.oversample=0.9", "rollout.oversample is 0.9"),
        ("update.lr", "is not key=value"),
        ("model.name=x", "'name' lies in no section"),
        ("model=nowhere", "give the folder of a Hugging Face model"),
        ("model=empty", "there is no empty/config.json"),
        ("data.path=absent.jsonl", "there is no such file"),
        ("data.path=bad.jsonl", "bad.jsonl, line 2 is not JSON"),
        ("data.path=lean.jsonl", "has no column 'prompt'"),
        ("data.path=chat.jsonl", "set data.template=chat"),
        ("data.path=number.jsonl", "column 'prompt' is 3"),
        ("data.path=list.jsonl", "holds a list"),
        ("data.answer=solution", "has no column 'solution'"),
        ("data.template=chat", "has no chat template"),
        ("score.rewards=[{fn: 'rewards.py:missing'}]", "has no function 'missing'; it has fine"),
        ("score.rewards=[{fn: 'absent.py:fine'}]", "does not exist"),
        ("score.rewards=[{fn: 'broken.py:fine'}]", "fails on import"),
        ("score.rewards=[{fn: 'no.such.module:fine'}]", "can't be imported"),
        ("score.rewards=[{fn: fine}]", "is no import path"),
        ("score.rewards=[]", "score.rewards is empty, and a sampled response has no other"),
        (
            "score.rewards=[{fn: 'rewards.py:fine'}, {fn: 'rewards.py:fine'}]",
            "two rewards are named 'fine'",
        ),
        ("update.minibatches=3", "data.batch_size 8 doesn't divide by update.minibatches 3"),
        ("rollout.samples_per_prompt=1", "and grpo compares the samples of a prompt"),
        ("update.advantage=gae", "gae needs a critic, and update.critic is null: take"),
        ("update.critic={}", "update.critic is given, and update.advantage grpo reads no values"),
        ("update.critic.lrr=1", "there is no key 'update.critic.lrr': did you mean 'lr'?"),
        (
            "update={algorithm: ppo, loss: dpo}",
            "update.critic is given, and update.loss dpo learns from pairs",
        ),
        (
            "update={algorithm: ppo, critic: {model: nowhere}}",
            "update.critic: model is 'nowhere', and there is no nowhere/config.json",
        ),
        (
            "update={algorithm: ppo, critic: {model: verdicts}}",
            "'verdicts' is a LlamaForSequenceClassification with 3 labels, and a value is one",
        ),
        (
            "update={algorithm: ppo, critic: {model: encoder}}",
            "'encoder' is a BertModel, and values come from a causal language model",
        ),
        (
            "update={algorithm: ppo, critic: {model: narrow}}",
            "update.critic.model narrow has a context of 64, and the policy's is 128",
        ),
        ("update.advantage=grop", "there is no such estimator; there are dr_grpo, gae, gdpo, grpo"),
        ("update.advantage=rewards.py:absent", "has no function 'absent'; it has fine"),
        ("update.gamma=0.9", "grpo does not discount: take gamma 1, or one of reinforce"),
        ("update.overlong_buffer_tokens=9", "is more than rollout.max_new_tokens 8"),
        ("update.loss=klip", "there is no such loss; there are clip, gspo, cispo"),
        ("update.loss=rewards.py:absent", "has no function 'absent'; it has fine"),
        ("update.clip_dual=0.9", "update.clip_dual is 0.9: input should be greater than 1"),
        ("update.sapo_tau_pos=2", "update.loss clip does not read it: leave it out, or take sapo"),
        ("update.correction_floor=0.5", "only update.correction=mis has a lower bound"),
        ("update.reward_kl_target=6", "reward_kl_coef 0 stays 0 whatever is measured"),
        (
            "update.sp=2",
            "ranks 1 doesn't divide by update.sp 2, the ranks that share a sequence: take 2 ranks",
        ),
        ("update.sp=0", "update.sp is 0: input should be greater than or equal to 1"),
        ("model=windowed", "has sliding_attention (sliding_window 4096) in all layers, and packed"),
        ("model=capped", "has softcapped attention (attn_logit_softcapping 50), and packed"),
        ("model=sunk", "model 'sunk' has attention sinks (model_type gpt_oss), and packed"),
        ("model=linear", "has linear_attention in layers 0, 2, and packed sequences are served by"),
        ("model=recurrent", "model 'recurrent' has mamba layers (mamba_d_state), and packed"),
        ("model=forgetful", "has a dropout of 0.1 in attention, which is not served: set it to"),
        ("resources.rollout.engines=9", "more than an iteration's 1 shards"),
        ("rollout.max_new_tokens=128", "pass the model's context of 128"),
        ("data.max_prompt_tokens=125", "pass the model's context of 128"),
        ("store=memory://runs", "seen by one process only"),
    ],
)
def test_config_that_cannot_work_is_refused_in_a_sentence(
    bench, monkeypatch, capsys, override, sentence
):
    code, printed = ratchet(bench, monkeypatch, capsys, "train", "run.yaml", override)
    assert code == 2
    assert printed.err.startswith("ratchet: ")
    assert sentence in printed.err
    assert printed.err.count("\n") == 1
    assert not (bench / "runs").exists()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["update.advantage=gdpo", "update.reward_kl_coef=0.1"],
            "gdpo gives each part of the reward a scale of its own: take update.kl_coef instead",
        ),
        (
            [
                "update.reward_kl_coef=0.1",
                "update.reward_kl_target=6",
                "update.reward_kl_horizon=12",
            ],
            "for an iteration of 64 samples, which could take the coefficient to 0: take more than",
        ),
        (
            [
                "rollout.samples_per_prompt=1",
                "update.advantage=reinforce",
                "update.zero_spread=drop",
            ],
            "leaves out groups of equal rewards: all of them",
        ),
        (
            ["update.correction=tis", "update.old_logprobs=sampler"],
            "the ratio itself is against the sampler: take old_logprobs=recompute",
        ),
        (
            ["update.correction=mis", "update.correction_floor=2"],
            "correction_floor 2 is not below update.correction_cap 2, so every token",
        ),
        (
            ["update.loss=dpo", "update.advantage=reinforce", "rollout.samples_per_prompt=1"],
            "update.loss dpo compares the samples of a prompt: take 2 or more",
        ),
        (
            ["update.loss=dpo", "update.correction=tis"],
            "takes pairs from whatever sampled them: leave update.correction at none",
        ),
        (
            ["rollout.max_rounds=3"],
            "with groups whose rewards differ, and update.zero_spread=keep keeps the others too",
        ),
        (
            [
                "rollout.max_rounds=3",
                "rollout.oversample=1.5",
                "update.zero_spread=drop",
                "update.reward_kl_coef=0.1",
                "update.reward_kl_target=6",
                "update.reward_kl_horizon=57",
            ],
            # 12 prompts of 8 samples in each of 3 rounds.
            "for an iteration of 288 samples, which could take the coefficient to 0",
        ),
        (
            ["update.sp=4", "resources.update.ranks=6"],
            "sp 4, the ranks that share a sequence: take 4 or 8 ranks, or another sp",
        ),
        (
            ["update.sp=16", "resources.update.ranks=16"],
            "model 'model' has 4 attention heads, which ranks share out: take an sp of 4 at most",
        ),
        (
            ["update.sp=2", "resources.update.ranks=2", "model=stretched"],
            "model 'stretched' has longrope position embeddings, which change with the longest",
        ),
        (
            ["update.loss=ipo", "update.loss_aggregation=sequence_mean"],
            "ipo is a mean over pairs, and update.loss_aggregation sequence_mean is one of tokens",
        ),
    ],
)
def test_fields_that_do_not_fit_each_other_are_refused_in_a_sentence(
    bench, monkeypatch, capsys, overrides, sentence
):
    code, printed = ratchet(bench, monkeypatch, capsys, "plan", "run.yaml", *overrides)
    assert (code, printed.err.count("\n")) == (2, 1)
    assert sentence in printed.err


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["train", "absent.yaml"], "can't be read"),
        (["train", "list.yaml"], "holds no mapping"),
        (["train", "broken.yaml"], "is not YAML"),
        (["resume", "nowhere"], "there is no run at"),
        (["status", "nowhere"], "there is no run at"),
        (["samples", "nowhere"], "give the folder or URL of a run"),
        (["export", "nowhere", "--to", "out"], "there is no run at"),
    ],
)
def test_command_without_its_file_or_run_is_refused(bench, monkeypatch, capsys, args, sentence):
    code, printed = ratchet(bench, monkeypatch, capsys, *args)
    assert (code, printed.err.count("\n")) == (2, 1)
    assert sentence in printed.err


def test_run_with_another_identity_is_refused_by_name_and_left_alone(bench, monkeypatch, capsys):
    from flows.config import load_config
    from flows.plan import make_plan
    from flows.record import open_run

    monkeypatch.chdir(bench)
    open_run(make_plan(load_config("run.yaml", ["store=other"])))
    record = (bench / "other" / "run" / "run.json").read_bytes()
    args = ["train", "run.yaml", "store=other", "update.lr=0.5", "rollout.top_k=3"]
    code, printed = ratchet(bench, monkeypatch, capsys, *args)
    assert code == 2
    assert "update.lr: 1e-06 → 0.5" in printed.err
    assert "rollout.top_k: 0 → 3" in printed.err
    assert (bench / "other" / "run" / "run.json").read_bytes() == record


@pytest.mark.parametrize(
    "args", [["--help"], ["train", "--help"], ["train", "run.yaml", "update.lrr=1"]]
)
def test_help_and_config_errors_load_nothing_heavy(bench, args):
    code = (
        "import sys, json\nfrom flows.cli import main\nsys.argv = json.loads(sys.argv[1])\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(["ratchet", *args])],
        cwd=bench,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stderr.splitlines()[-1]) == []


def test_plan_prints_the_derived_sizes(bench, monkeypatch, capsys):
    monkeypatch.chdir(bench)
    monkeypatch.setattr(sys, "argv", ["ratchet", "plan", "run.yaml", "--json"])
    with pytest.raises(SystemExit):
        main()
    sizes = json.loads(capsys.readouterr().out)
    assert sizes["samples an iteration"] == "64"
    assert sizes["prompt limit, tokens"] == "120"


def test_plan_prints_how_ranks_share_sequences(bench, monkeypatch, capsys):
    fields = ["resources.update.ranks=6", "update.sp=3", "update.max_tokens_per_rank=1000"]
    _, printed = ratchet(bench, monkeypatch, capsys, "plan", "run.yaml", *fields, "--json")
    sizes = json.loads(printed.out)
    assert sizes["trainer ranks"] == "2 × 3"
    assert sizes["tokens a micro-batch"] == "3000"
    assert sizes["attention heads a rank"] == "2"  # 4 heads, and 2 of zeros


def test_plan_prints_rounds_where_they_fill_the_batch(bench, monkeypatch, capsys):
    fields = ["rollout.max_rounds=4", "rollout.oversample=1.5", "update.zero_spread=drop"]
    _, printed = ratchet(bench, monkeypatch, capsys, "plan", "run.yaml", *fields, "--json")
    sizes = json.loads(printed.out)
    assert sizes["rounds an iteration"] == "1 to 4"
    assert sizes["prompts drawn an iteration"] == "12 to 48"
    assert sizes["shards a round"] == "2"
    assert sizes["prompts an optimizer step"] == "8"


def test_plan_prints_what_the_algorithm_set_and_what_the_user_did(bench, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    args = ["plan", "run.yaml", "update.algorithm=dapo", "update.clip_high=0.25"]
    code, printed = ratchet(bench, monkeypatch, capsys, *args)
    assert code == 0
    lines = [line.strip().split(maxsplit=2) for line in printed.out.splitlines()]
    assert ["update.zero_spread", "drop", "set by update.algorithm dapo"] in lines
    assert ["update.clip_high", "0.25", "yours; update.algorithm dapo sets 0.28"] in lines


def test_run_that_is_given_another_algorithm_is_refused_by_what_that_changes(
    bench, monkeypatch, capsys
):
    from flows.config import load_config
    from flows.plan import make_plan
    from flows.record import open_run

    monkeypatch.chdir(bench)
    open_run(make_plan(load_config("run.yaml", ["store=dapo", "update.algorithm=dapo"])))
    args = ["resume", "dapo/run", "update.algorithm=reinforce_pp"]
    code, printed = ratchet(bench, monkeypatch, capsys, *args)
    assert code == 2
    for change in ("update.advantage: 'grpo' → 'reinforce_pp'", "update.clip_high: 0.28 → 0.2"):
        assert change in printed.err
