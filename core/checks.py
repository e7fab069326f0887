"""Self-checks on real rows before a run spends hours: what SFT trains on is what a rollout produces and parses."""

from core.chat import parse, prompt_ids, render, tool_suffix, visible
from core.config import UserError


def check_rendering(tokenizer, row: dict, tools: list) -> None:
    """SFT's ids of a row == the ids a rollout would have, the mask covers exactly the model's turns, calls parse back.

    Walks the rendered conversation as the rollout builds it: prompt, turn, tool suffix, turn, ...
    """
    completion = visible(row["messages"][len(row["prompt"]) :])
    completion = [{k: v for k, v in m.items() if k != "train"} for m in completion]
    ids, mask = render(tokenizer, row["prompt"] + completion, tools)
    built = prompt_ids(tokenizer, row["prompt"], tools)
    position, n = len(built), 0
    _expect(ids[:position] == built and not any(mask[:position]), row, "the prompt differs", tokenizer, ids, built)
    while n < len(completion):
        message = completion[n]
        end = position
        while end < len(ids) and mask[end]:
            end += 1
        turn = ids[position:end]
        _expect(bool(turn) and turn[-1] == tokenizer.eos_token_id, row, "a turn does not end in the stop token",
                tokenizer, ids, built)  # fmt: skip
        parsed = parse(tokenizer, turn, ids[:position], tools)
        same = parsed["content"].strip() == message["content"].strip() and (parsed.get("tool_calls") or []) == (
            message.get("tool_calls") or []
        )
        _expect(same, row, f"the parser reads {parsed} where the row says {message}", tokenizer, ids, built)
        results = []
        while n + 1 + len(results) < len(completion) and completion[n + 1 + len(results)]["role"] != "assistant":
            results.append(completion[n + 1 + len(results)])
        n += 1 + len(results)
        position = end
        if results:
            suffix = tool_suffix(tokenizer, results)
            _expect(ids[end : end + len(suffix)] == suffix and not any(mask[end : end + len(suffix)]), row,
                    "a tool result is rendered otherwise in a rollout", tokenizer, ids, suffix)  # fmt: skip
            position = end + len(suffix)
    _expect(not any(mask[position:]), row, "the loss mask covers text after the last turn", tokenizer, ids, built)


def _expect(ok: bool, row: dict, what: str, tokenizer, ids: list[int], other: list[int]) -> None:
    if not ok:
        raise UserError(
            f"self-check on row {row['id']}: {what}. Training would learn another format than rollouts use.\n"
            f"rendered: {tokenizer.decode(ids)!r}\nrollout:  {tokenizer.decode(other)!r}"
        )
