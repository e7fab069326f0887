"""How a conversation becomes tokens: the one template, its rendering with a loss mask, and the parser of tool calls.

Token-in/token-out: what the policy generated is never tokenised again. `render` serves SFT and the self-check,
`prompt_ids` and `tool_suffix` serve the rollout, `parse` reads what was generated. The template (core/agent.jinja) is
written in ChatML; models that know another turn syntax (Llama 3) get the same template with their own markers.
"""

import functools
import hashlib
import inspect
import re
from pathlib import Path

from core.config import UserError

TEMPLATE = Path(__file__).with_name("agent.jinja")

# Turn syntax by family: (text before the role, text after the role, end token, text after the end token).
FAMILIES = {
    "chatml": ("<|im_start|>", "\n", "<|im_end|>", "\n"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", ""),
}


def family_of(tokenizer) -> str:
    """The family whose turn markers are single tokens of this vocabulary."""
    vocabulary = tokenizer.get_vocab()
    for name, (opening, _, end, _) in FAMILIES.items():
        if opening in vocabulary and end in vocabulary:
            return name
    raise UserError(
        f"{tokenizer.name_or_path}: its vocabulary has the turn markers of none of {', '.join(FAMILIES)}; "
        "choose a Qwen2/2.5/3, SmolLM2 or Llama-3.x instruct model, or add its family to core/chat.py"
    )


def template_for(family: str, training: bool = True) -> str:
    """The Jinja text for a family; `training=False` leaves out the loss markers, for exports and other engines."""
    text = TEMPLATE.read_text(encoding="utf-8")
    if not training:
        text = re.sub(r"\{%-? (end)?generation %\}", "", text)
    if family != "chatml":
        text = text.replace(_markers(*FAMILIES["chatml"]), _markers(*FAMILIES[family]))
        text = text.replace("set bos = ''", "set bos = bos_token")
    return text


def _markers(*markers: str) -> str:
    """The template's own line of turn markers, as it stands in the file."""
    return ", ".join("'" + m.replace("\n", "\\n") + "'" for m in markers)


def agent_tokenizer(tokenizer):
    """Give a tokenizer the project's template, TRL's parser for it, the turn's end as EOS, and left padding."""
    from trl.chat_template_utils import qwen3_template

    family = family_of(tokenizer)
    opening, after_role, end, _ = FAMILIES[family]
    tokenizer.chat_template = template_for(family)
    response = dict(qwen3_template)
    response["start_anchor"] = f"{opening}assistant{after_role}"
    response["fields"] = dict(response["fields"])
    response["fields"]["content"] = {"close_pattern": re.escape(end) + r"\s*", "content": "text"}
    tokenizer.response_template = response
    tokenizer.parse_response = functools.partial(_sound, tokenizer.parse_response)
    tokenizer.eos_token = end
    if tokenizer.pad_token is None or tokenizer.pad_token == end:
        tokenizer.pad_token = _pad_token(tokenizer, end)
    tokenizer.padding_side = "left"
    return tokenizer


def vocabulary_key(tokenizer) -> str:
    """Names the vocabulary: ids of two tokenizers compare only where it is the same."""
    return hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:12]


def _pad_token(tokenizer, end: str) -> str:
    """A padding token that is not the end of a turn, so that masking padding never masks the stop token."""
    vocabulary = tokenizer.get_vocab()
    for token in ("<|endoftext|>", "<|finetune_right_pad_id|>", "<|end_of_text|>", "<pad>", "</s>"):
        if token in vocabulary and token != end:
            return token
    raise UserError(f"{tokenizer.name_or_path}: no padding token other than '{end}' found; set tokenizer.pad_token")


@functools.cache
def _method_names(environment_class) -> tuple[str, ...]:
    functions = inspect.getmembers(environment_class, predicate=inspect.isfunction)
    return tuple(n for n, _ in functions if not n.startswith("_") and n not in ("reset", "get_reward"))


def tools_of(environment) -> dict:
    """Name -> bound method of every tool; the rule is TRL's: every public method but reset."""
    return {name: getattr(environment, name) for name in _method_names(type(environment))}


def schemas_of(environment) -> list[dict]:
    from transformers.utils import get_json_schema

    return [get_json_schema(method) for method in tools_of(environment).values()]


def visible(messages: list[dict]) -> list[dict]:
    """Messages as a model reads them: a workflow's turns hold their query and its result as text (core/workflow.py)."""
    shown = [m for m in messages if not ("turn" in m and m["role"] == "tool")]
    return [{k: v for k, v in m.items() if k != "tool_calls"} if "turn" in m else m for m in shown]


def render(tokenizer, messages: list[dict], tools: list | None) -> tuple[list[int], list[int]]:
    """Token ids of a whole conversation and the loss mask: 1 on what the model writes, end token included."""
    messages = visible(messages)
    out = tokenizer.apply_chat_template(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
    return out["input_ids"], out["assistant_masks"]


def prompt_ids(tokenizer, messages: list[dict], tools: list | None) -> list[int]:
    return tokenizer.apply_chat_template(visible(messages), tools=tools, add_generation_prompt=True, return_dict=False)


def tool_suffix(tokenizer, tool_messages: list[dict]) -> list[int]:
    """Ids between the end token of a turn and the model's next one, by TRL's own construction: results, or a prompt."""
    head = [{"role": "user", "content": "dummy"}, {"role": "assistant", "content": ""}]
    if tool_messages[0]["role"] == "tool":
        call = {"type": "function", "function": {"name": tool_messages[0]["name"], "arguments": {}}}
        head[1]["tool_calls"] = [call]
    before = tokenizer.apply_chat_template(head, return_dict=False)
    whole = tokenizer.apply_chat_template(head + tool_messages, add_generation_prompt=True, return_dict=False)
    end = len(before) - before[::-1].index(tokenizer.eos_token_id)  # templates may write a newline after the end token
    if whole[:end] != before[:end]:
        raise UserError(
            "the chat template is not prefix-preserving: a tool's result changes the turns before it, so the model would "
            f"be trained on other tokens than it wrote. Put {TEMPLATE.name} back as it was: git checkout core/{TEMPLATE.name}"
        )
    return whole[end:]


def parse(tokenizer, ids: list[int], prefix: list[int], tools: list | None) -> dict:
    """The assistant message in `ids`, with TRL's parser, so that both loops read the same calls."""
    from trl.chat_template_utils import parse_response

    return parse_response(tokenizer, ids, prefix=prefix, tools=tools)


def _sound(parse_response, *args, **kwargs) -> dict:
    """What TRL calls too: a call nested so deeply that nothing can read it back is malformed, as other broken JSON is."""
    try:
        return storable(parse_response(*args, **kwargs))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def storable(value, room: int = 50):
    """Parsed JSON without lone surrogates ("\\ud800"), which neither files nor tokenizers take."""
    if not room:
        raise ValueError("nested too deeply")
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [storable(item, room - 1) for item in value]
    if isinstance(value, dict):
        return {storable(k, room - 1): storable(v, room - 1) for k, v in value.items()}
    return value
