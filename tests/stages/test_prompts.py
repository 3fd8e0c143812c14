"""What prompts keep of a data row: of chat data the messages that its template rendered."""

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from artifacts.shards import read_table
from artifacts.store import Store
from stages.rollout.config import DataConfig
from stages.rollout.prompts import prepare, prompt_work

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}]
ROWS = {
    "messages": {"prompt": MESSAGES},
    "text": {"prompt": "1+1"},
    "pair": {"prompt": "1+1", "chosen": "2", "rejected": "3"},
}


@pytest.mark.parametrize(
    ("kind", "template", "messages"),
    [
        ("messages", "chat", MESSAGES),
        ("text", "chat", MESSAGES[1:]),
        ("pair", "chat", MESSAGES[1:]),
        ("text", "plain", None),
        ("pair", "plain", None),
    ],
)
def test_prompts_keep_the_messages_that_a_chat_template_rendered(
    tmp_path: Path, kind: str, template: str, messages: list[Any] | None
) -> None:
    tiny.tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}").save_pretrained(
        tmp_path
    )
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[kind]))
    pair = {"chosen": "chosen", "rejected": "rejected"} if kind == "pair" else {}
    data = DataConfig(path=str(path), answer=None, template=template, **pair)
    store = Store(str(tmp_path / "run"))
    made = prepare(store, prompt_work(data, "d" * 64, "t" * 64, 64, 64), data, str(tmp_path))
    (found,) = read_table(store, made.folder, made.manifest)["messages"].to_pylist()
    assert (None if found is None else json.loads(found)) == messages
