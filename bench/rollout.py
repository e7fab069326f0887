"""Episodes a minute of step 5's loop against evaluating one example at a time, same model, same questions, same answers.

    python bench/rollout.py --config recipes/demo.yaml --episodes 32

One at a time, as tutorials do it: for every turn the whole conversation is rendered and encoded again and goes through
`model.generate` (greedy, KV cache on). Ours: core/rollout.py with the recipe's batch size. Both run in this process, float32
on a CPU, one after the other in `--rounds` alternating parts. Prints how many episodes answer the same, the time of each (wall
and, for machines that others use too, CPU), and the ratio; exits with 1 where an answer differs or the ratio is below 4.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from core.config import UserError, load_recipe_args, run_step

ALONE, BATCHED, LEAST = "one at a time", "batched", 4.0


def add_arguments(parser):
    parser.add_argument(
        "--stage", default="", help="base, sft, grpo or a folder (default: sft if it is there, else base)"
    )
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1, help="parts in which both are measured in turn")


def main():
    recipe, args = load_recipe_args(__doc__, add_arguments)
    import torch

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

    def alone(episodes):
        for e in episodes:
            one_at_a_time(model, tokenizer, e)
        return {e.row["id"]: e for e in episodes}

    def together(episodes):
        return {e.row["id"]: e for batch in engine.play(episodes) for e in batch}

    print(f"{source}, {len(rows)} episodes, {device_name()}, {torch.get_num_threads()} threads, {model.dtype}")
    one_at_a_time(model, tokenizer, episode(rows[0]))  # warm up: allocator, workers of the sandbox
    wall, cpu, same, tokens = {ALONE: 0.0, BATCHED: 0.0}, {ALONE: 0.0, BATCHED: 0.0}, 0, 0
    parts = [rows[i :: args.rounds] for i in range(args.rounds)]
    for n, part in enumerate(parts, 1):
        found = {}
        for name, play in ((ALONE, alone), (BATCHED, together)):
            began, busy = time.perf_counter(), time.process_time()
            found[name] = play([episode(row) for row in part])
            wall[name] += time.perf_counter() - began
            cpu[name] += time.process_time() - busy
        for row in part:
            one, other = (found[name][row["id"]] for name in (ALONE, BATCHED))
            tokens += other.tokens
            same += answer_text(row, one.completion) == answer_text(row, other.completion)
            if answer_text(row, one.completion) != answer_text(row, other.completion):
                print(f"DIFFERENT {row['id']}:\n  {one.completion}\n  {other.completion}")
        print(f"part {n}/{len(parts)}: " + ", ".join(f"{k} {v:.0f} s" for k, v in wall.items()), flush=True)
    for name in (ALONE, BATCHED):
        rates = f"{60 * len(rows) / wall[name]:6.1f} episodes/min  {tokens / wall[name]:6.1f} tokens/s"
        print(f"{name:14} {rates}  {wall[name]:6.1f} s  {cpu[name]:6.1f} s of CPU")
    ratio = wall[ALONE] / wall[BATCHED]
    print(f"same answers: {same} of {len(rows)}; ratio {ratio:.2f}x (CPU time {cpu[ALONE] / cpu[BATCHED]:.2f}x)")
    sys.exit(0 if same == len(rows) and ratio >= LEAST else 1)


def one_at_a_time(model, tokenizer, episode) -> None:
    """The conversation as text at every turn, through `generate`; the tools and the budget are those of `episode`."""
    import torch

    from core.chat import parse, prompt_ids

    while True:
        ids = prompt_ids(tokenizer, episode.row["prompt"] + episode.completion, episode.tools)
        left = episode.agent.max_completion_length - (len(ids) - len(episode.prompt_ids))
        if left <= 0:
            return
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
            return


if __name__ == "__main__":
    if "--config" not in sys.argv:
        sys.argv += ["--config", "recipes/demo.yaml"]
    run_step(main)
