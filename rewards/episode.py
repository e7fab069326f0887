"""Reading an episode: the tool calls, the final message and the text of a completion, whatever the model wrote into them.

A completion is a list of messages (assistant, tool, assistant, ...). The *final message* is an assistant message without
tool calls at the end of it; an episode that ends otherwise (turn limit, truncation) has none. Thoughts are not read:
neither `reasoning_content` nor `<think>...</think>`, closed or not.
"""

import json
import re
from dataclasses import dataclass

_TAG = re.compile(r"</?tool_call>|</?tool_response>|<\|[a-z_]+\|>|</?tools?>", re.IGNORECASE)
_THINK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict | None  # None: the model wrote something that is no object
    result: str | None  # None: never answered (turn limit, truncation)


def text_of(message: dict) -> str:
    content = message.get("content")
    if isinstance(content, list):  # content blocks
        content = "".join(part["text"] for part in content if isinstance(part, dict) and "text" in part)
    return content if isinstance(content, str) else ""


def final_message(completion: list[dict]) -> str | None:
    """The text of the final message without its thoughts; None where the episode has no final message."""
    if not completion or completion[-1].get("role") != "assistant" or completion[-1].get("tool_calls"):
        return None
    return without_thoughts(text_of(completion[-1]))


def without_thoughts(text: str) -> str:
    text = _THINK.sub("", text)
    return re.split(r"</think>", text, flags=re.IGNORECASE)[-1].strip()  # one whose opening the template wrote


def calls(completion: list[dict]) -> list[Call]:
    """Every tool call in order, with the result that answers it."""
    out: list[Call] = []
    for at, message in enumerate(completion):
        if message.get("role") != "assistant" or not message.get("tool_calls"):
            continue
        results = []
        for follower in completion[at + 1 :]:
            if follower.get("role") != "tool":
                break
            results.append(text_of(follower))
        for i, call in enumerate(message["tool_calls"]):
            out.append(_call(call, results[i] if i < len(results) else None))
    return out


def _call(call, result: str | None) -> Call:
    function = call.get("function", call) if isinstance(call, dict) else {}
    name, arguments = function.get("name"), function.get("arguments")
    if isinstance(arguments, str):  # OpenAI's wire format
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    return Call(name if isinstance(name, str) else "", arguments if isinstance(arguments, dict) else None, result)


def argument(call: Call, tool: str, name: str) -> str | None:
    """The one text argument of a valid call of `tool`, None where the call is not valid."""
    if call.name != tool or call.arguments is None or set(call.arguments) != {name}:
        return None
    value = call.arguments[name]
    return value if isinstance(value, str) and value.strip() else None


def written(completion: list[dict]) -> str:
    """All text the model wrote as content."""
    return "\n".join(text_of(m) for m in completion if m.get("role") == "assistant")


def has_stray_tags(completion: list[dict]) -> bool:
    """Marks of the protocol in content: calls that did not parse, invented tool results, tag spam."""
    return bool(_TAG.search(written(completion)))
