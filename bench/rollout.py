"""Episodes a minute of step 5's loop against evaluating one example at a time, same model, same questions, same answers.

    python bench/rollout.py --config recipes/demo.yaml --episodes 32

One at a time, as tutorials do it: for every turn the whole conversation is rendered and encoded again and goes through
`model.generate` (greedy, KV cache on). Ours: core/rollout.py with the recipe's batch size. Both run in this process, float32
on a CPU, one after the other in `--rounds` alternating parts, and both end in the same judge's hands. Prints episodes that
answer the same, times, and the ratio; exits with 1 where an answer differs or the ratio is below `--least`.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from core.config import UserError, load_recipe_args, run_step


def add_arguments(parser):
    parser.add_argument(
        "--stage", default="", help="base, sft, grpo or a folder (default: sft if it is there, else base)"
    )
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1, help="parts in which both are measured in turn")
    parser.add_argument("--least", type=float, default=4.0, help="the ratio that must be reached")


def main():
    recipe, args = load_recipe_args(__doc__, add_arguments)
    from core.artifacts import device_name, read_jsonl
    from core.models import load_model, load_tokenizer, stage_source
    from core.rollout import Episode, TransformersEngine
    from envs import ENVIRONMENTS
    from rewards import answer_text
    from tasks.prepare import environment_limits

    rows = read_jsonl(recipe.data_dir / "eval.jsonl", f"python step2_prepare_data.py --config {args.config}")
    rows = rows[: args.episodes]
    try:
        source = stage_source(recipe, args.stage or "sft")
    except UserError:
        if args.stage:
            raise
        source = stage_source(recipe, "base")
    model, tokenizer = load_model(source).eval(), load_tokenizer(source)
    engine = TransformersEngine(model, tokenizer, recipe.eval.batch_size)

    def episode(row):
        env = ENVIRONMENTS[row["environment"]](**environment_limits(recipe, row["environment"]))
        return Episode(row, env, tokenizer, recipe.agent)

    print(f"{source}, {len(rows)} episodes, {device_name()}, {model.dtype}")
    one_at_a_time(model, tokenizer, episode(rows[0]))  # warm up: allocator, workers of the sandbox
    seconds, same, tokens = {"one at a time": 0.0, "batched": 0.0}, 0, 0
    parts = [rows[i :: args.rounds] for i in range(args.rounds)]
    for n, part in enumerate(parts):
        began = time.perf_counter()
        single = [one_at_a_time(model, tokenizer, episode(row)) for row in part]
        seconds["one at a time"] += time.perf_counter() - began
        began = time.perf_counter()
        batched = {e.row["id"]: e for batch in engine.play([episode(row) for row in part]) for e in batch}
        seconds["batched"] += time.perf_counter() - began
        for row, completion in zip(part, single, strict=True):
            other = batched[row["id"]]
            tokens += other.tokens
            same += answer_text(row, completion) == answer_text(row, other.completion)
            if answer_text(row, completion) != answer_text(row, other.completion):
                print(f"DIFFERENT {row['id']}:\n  {completion}\n  {other.completion}")
        print(f"part {n + 1}/{len(parts)}: " + ", ".join(f"{k} {v:.0f} s" for k, v in seconds.items()), flush=True)
    for name, spent in seconds.items():
        print(f"{name:14} {60 * len(rows) / spent:6.1f} episodes/min  {tokens / spent:6.1f} tokens/s  {spent:6.1f} s")
    ratio = seconds["one at a time"] / seconds["batched"]
    print(f"same answers: {same} of {len(rows)}; ratio {ratio:.2f}x")
    sys.exit(0 if same == len(rows) and ratio >= args.least else 1)


def one_at_a_time(model, tokenizer, episode) -> list[dict]:
    """The conversation as text at every turn, through `generate`; the tools and the budget are those of `episode`."""
    import torch

    from core.chat import parse, prompt_ids

    while True:
        ids = prompt_ids(tokenizer, episode.row["prompt"] + episode.completion, episode.tools)
        left = episode.agent.max_completion_length - (len(ids) - len(episode.prompt_ids))
        if left <= 0:
            return episode.completion
        inputs = torch.tensor([ids])
        with torch.no_grad():
            out = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=left,
                do_sample=False,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        written = out[0, len(ids) :].tolist()
        if not episode.accept_message(parse(tokenizer, written, ids, episode.tools)):
            return episode.completion


if __name__ == "__main__":
    run_step(main)
