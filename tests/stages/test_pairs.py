"""Given pairs: whose tokens are whose, and rows that are none, by file and line."""

import json
import re

import pytest

import tiny
from artifacts.store import Store
from stages.rollout.config import DataConfig, DataSource
from stages.rollout.pairs import encode_pair, read_pair, text_of
from stages.rollout.prompts import encode_prompt, prepare, prompt_work
from stages.rollout.rows import read_rows

TALK = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Says something else of a turn once another follows, as templates that hide thoughts do.
FORGETFUL = "{% for m in messages %}{{ m['content'] if loop.last else 'x' }}{% endfor %}"
SOURCE = DataSource(path="p.jsonl", chosen="chosen", rejected="rejected")


def merging_tokenizer(template=None):
    """Every character a token, but "=1" and "12" are one each, wherever they stand."""
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokens = ["<eos>", *(chr(code) for code in range(32, 127)), "\n", "=1", "12"]
    ids = {token: index for index, token in enumerate(tokens)}
    inner = Tokenizer(models.BPE(ids, [("=", "1"), ("1", "2")], unk_token=None))
    inner.add_special_tokens([AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", chat_template=template
    )


def encoded(tokenizer, record, template):
    """The record's pair as it is tokenised, and both conversations as one text each."""
    pair = read_pair("p.jsonl, line 1", record, SOURCE, template)
    row = type("Row", (), {"prompt": record["prompt"]})
    text, ids = encode_prompt(tokenizer, row, template)
    tokens = encode_pair(tokenizer, "p.jsonl, line 1", row.prompt, pair, template, text, ids)
    return tokens, text, ids


def tokens_of(tokenizer, ids):
    return tokenizer.convert_ids_to_tokens(ids)


def test_plain_pair_goes_on_from_the_prompt_to_the_end_token():
    tokenizer = merging_tokenizer()
    record = {"prompt": "2+2=", "chosen": "4", "rejected": "5 12"}
    tokens, _, ids = encoded(tokenizer, record, "plain")
    assert tokens.prompt_ids == ids
    assert tokens_of(tokenizer, tokens.chosen_ids) == ["4", "<eos>"]
    assert tokens_of(tokenizer, tokens.rejected_ids) == ["5", " ", "12", "<eos>"]


def test_plain_pair_with_an_end_token_of_its_own_gets_no_second():
    tokenizer = merging_tokenizer()
    record = {"prompt": "2+2=", "chosen": "4<eos>", "rejected": "5"}
    tokens, _, _ = encoded(tokenizer, record, "plain")
    assert tokens_of(tokenizer, tokens.chosen_ids) == ["4", "<eos>"]


def test_token_across_the_border_belongs_to_the_responses_of_both():
    tokenizer = merging_tokenizer()
    record = {"prompt": "6+6=", "chosen": "12", "rejected": "9"}
    tokens, _, ids = encoded(tokenizer, record, "plain")
    assert tokens_of(tokenizer, ids) == ["6", "+", "6", "="]
    assert tokens_of(tokenizer, tokens.prompt_ids) == ["6", "+", "6"]
    assert tokens_of(tokenizer, tokens.chosen_ids) == ["=1", "2", "<eos>"]
    assert tokens_of(tokenizer, tokens.rejected_ids) == ["=", "9", "<eos>"]
    whole = tokenizer("6+6=12<eos>")["input_ids"]
    assert tokens.prompt_ids + tokens.chosen_ids == whole


@pytest.mark.parametrize("prompt", ["6+6=", [{"role": "user", "content": "6+6="}]])
@pytest.mark.parametrize("form", ["text", "reply", "conversation"])
def test_chat_pair_is_the_whole_conversation_in_every_form(prompt, form):
    tokenizer = merging_tokenizer(TALK)

    def response(text):
        reply = [{"role": "assistant", "content": text}]
        asked = [{"role": "user", "content": "6+6="}]
        return {"text": text, "reply": reply, "conversation": asked + reply}[form]

    record = {"prompt": prompt, "chosen": response("12"), "rejected": response("9")}
    tokens, text, ids = encoded(tokenizer, record, "chat")
    assert text == "<user>6+6=<eos>\n<assistant>"
    for given, ours in (("12", tokens.chosen_ids), ("9", tokens.rejected_ids)):
        whole = tokenizer(f"{text}{given}<eos>\n", add_special_tokens=False)["input_ids"]
        assert tokens.prompt_ids + ours == whole
    assert tokens.prompt_ids == ids


def test_chat_pair_keeps_its_text_for_people():
    record = {"prompt": "a", "chosen": [{"role": "assistant", "content": "b"}], "rejected": "c"}
    pair = read_pair("here", record, SOURCE, "chat")
    assert (text_of(pair.chosen), text_of(pair.rejected)) == ("b", "c")


def test_template_that_rewrites_the_prompt_is_refused():
    record = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(ValueError, match="line 1: the chat template writes the prompt in another"):
        encoded(merging_tokenizer(FORGETFUL), record, "chat")


def turns(*roles):
    return [{"role": role, "content": "b"} for role in roles]


@pytest.mark.parametrize(
    ("template", "change", "sentence"),
    [
        ("plain", {"chosen": None}, "line 2: column 'chosen' is None, not a text or messages"),
        ("plain", {"rejected": ""}, "line 2: column 'rejected' is '', not a text or messages"),
        ("plain", {"chosen": 7}, "line 2: column 'chosen' is 7, not a text"),
        ("plain", {"chosen": "no"}, "'chosen' and 'rejected' hold the same response"),
        ("plain", {"chosen": turns("assistant")}, "need a chat template: set template=chat"),
        ("chat", {"chosen": turns("user")}, "it has 1 after the prompt's; write a text"),
        ("chat", {"chosen": turns("assistant", "user", "assistant")}, "it has 3 after"),
        ("chat", {"rejected": ["no"]}, "line 2: column 'rejected' is not the assistant's one"),
    ],
)
def test_row_without_a_pair_is_refused_by_file_and_line(tmp_path, template, change, sentence):
    good = {"prompt": "a?", "chosen": "yes", "rejected": "no"}
    path = tmp_path / "p.jsonl"
    path.write_text(f"{json.dumps(good)}\n{json.dumps(good | change)}\n")
    source = SOURCE.model_copy(update={"path": str(path)})
    with pytest.raises(ValueError, match=re.escape(sentence)) as refused:
        list(read_rows(source, template))
    assert str(refused.value).startswith(f"{path}, line 2")


def test_row_without_a_pairs_column_is_refused_with_its_key(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "chosen": "b"}\n')
    source = SOURCE.model_copy(update={"path": str(tmp_path / "p.jsonl")})
    with pytest.raises(ValueError, match=r"no column 'rejected', which data.rejected names"):
        list(read_rows(source, "plain"))


@pytest.fixture
def prepared(tmp_path):
    """Prompts and pairs of three rows, of which the second has a response of 5 tokens."""
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"prompt": "1+1=", "chosen": c, "rejected": "3"} for c in ("2", "2222", "02")]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def prepare_with(**options):
        data = DataConfig(
            path=str(path), chosen="chosen", rejected="rejected", template="plain", **options
        )
        work = prompt_work(data, "d" * 64, "e" * 64, 16, response_limit=4)
        return prepare(Store(str(tmp_path / "run")), work, data, str(tmp_path / "model"))

    return prepare_with


def test_response_over_the_limit_is_refused_by_file_and_line(prepared):
    with pytest.raises(ValueError, match=r"line 2: the chosen response has 5 tokens, and"):
        prepared()


def test_response_over_the_limit_is_skipped_and_counted_where_asked(prepared):
    made = prepared(overlong="skip")
    assert made.manifest.outcome == {"rows": [2], "skipped": [1]}


def test_pair_columns_go_together_and_ask_for_no_answer():
    with pytest.raises(ValueError, match="give both chosen and rejected"):
        DataConfig(path="p.jsonl", chosen="chosen")
    assert DataConfig(path="p.jsonl", chosen="a", rejected="b").all_sources[0].answer is None
