"""What models read of a sample: the messages before the response, or a text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]


def prompt_messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The prompt of a rollout row as messages; of a plain text, one of the user's."""
    messages = row.get("messages")
    if messages is not None:
        return list(json.loads(messages))
    return [{"role": "user", "content": row["prompt_text"]}]


def prompt_for_people(row: Mapping[str, Any]) -> str:
    """The prompt as a text without any template's marks."""
    messages = prompt_messages(row)
    if len(messages) == 1 and isinstance(messages[0].get("content"), str):
        return str(messages[0]["content"])
    return "\n\n".join(f"{each['role']}: {_text(each.get('content'))}" for each in messages)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(str(part.get("text", "")) for part in content)
    return ""
