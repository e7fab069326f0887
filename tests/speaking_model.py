"""A tiny real model that has learnt a few conversations by heart: it calls tools, reads results, answers and stops."""

from pathlib import Path


def rows() -> list[dict]:
    """Calculator rows whose conversations the model knows."""
    from tasks.gsm8k import SYSTEM

    out = []
    for n, (a, b) in enumerate([(12, 30), (7, 8), (90, 5), (61, 22)]):
        question = f"Ann has {a} apples and buys {b} more. How many?"
        out.append(
            {
                "id": f"apples-{n}",
                "task": "mini_math",
                "environment": "calculator",
                "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
                "question": question,
                "gold": str(a + b),
                "db_id": "",
                "db_path": "",
                "hardness": "easy",
                "difficulty": 0.0,
                "facts": [],
            }
        )
    return out


def messages(row: dict) -> list[dict]:
    from envs import CalculatorEnv
    from tasks.base import call, result, say

    env = CalculatorEnv()
    env.reset(**row)
    a, b = [int(word) for word in row["question"].split() if word.isdigit()]
    value = env.calculator(f"{a} + {b}")
    thought = {"reasoning_content": f"First {a}, then {b}."} if a > b else {}
    turns = [call("calculator", {"expression": f"{a} + {b}"}, "Add them.") | thought, result("calculator", value)]
    return row["prompt"] + turns + [say(f"<answer>{value}</answer>")]


def build_speaking_model(folder: Path, raw: Path, steps: int = 300, conversations: list | None = None) -> Path:
    """Writes an ordinary folder with the project's template; about ten seconds on one core. By default it learns `rows()`."""
    import torch
    from transformers import AutoModelForCausalLM

    from core.chat import render, schemas_of, template_for
    from core.models import load_tokenizer
    from envs import CalculatorEnv
    from tests.tiny_model import build_tiny_model

    build_tiny_model(folder, raw)
    tokenizer = load_tokenizer(str(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tools = schemas_of(CalculatorEnv())
    rendered = [render(tokenizer, c, tools) for c in conversations or map(messages, rows())]
    width = max(len(ids) for ids, _ in rendered)
    ids = torch.tensor([i + [tokenizer.pad_token_id] * (width - len(i)) for i, _ in rendered])
    labels = torch.tensor(
        [[t if m else -100 for t, m in zip(i, mask, strict=True)] + [-100] * (width - len(i)) for i, mask in rendered]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        loss = model(input_ids=ids, labels=labels).loss
        if loss < 0.01:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.05, f"the tiny model has not learnt its lines: loss {loss:.3f}"
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.chat_template = template_for("chatml", training=False)
    tokenizer.save_pretrained(folder)
    return folder
