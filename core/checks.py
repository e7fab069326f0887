"""Self-checks on real rows: what SFT trains on is what a rollout produces, rewards pay the right thing, and rollouts come
from the weights that are trained. Each one ends the run with an explanation; `--skip_checks` leaves them out.

Before the model is loaded: `check_rendering`, `check_rewards`. While it trains: `AdapterCheck`, `SamplerCheck`.
"""

from collections import Counter
from pathlib import Path

from transformers import TrainerCallback

from core.chat import FAMILIES, family_of, parse, prompt_ids, render, tool_suffix, visible
from core.config import UserError
from core.ranks import sharded

SKIPPED = (
    "WARNING: --skip_checks. Nothing looks after this run: not that rollouts come from the trained weights, not that the\n"
    "WARNING: loss covers what the model writes, not that rewards pay the right answer. Its figures prove little."
)


def check_rendering(tokenizer, row: dict, tools: list) -> None:
    """SFT's ids of a row == the ids a rollout would have, the mask covers exactly the model's turns, calls parse back.

    Walks the rendered conversation as the rollout builds it: prompt, turn, tool suffix, turn, ...
    """
    shown = visible(row["messages"][len(row["prompt"]) :])
    completion = [{k: v for k, v in m.items() if k != "train"} for m in shown]
    ids, mask = render(tokenizer, row["prompt"] + completion, tools)
    built = prompt_ids(tokenizer, row["prompt"], tools)
    opening = tokenizer.convert_tokens_to_ids(FAMILIES[family_of(tokenizer)][0])

    def expect(ok: bool, what: str, other: list[int]) -> None:
        if not ok:
            raise UserError(
                f"self-check on row {row['id']}: {what}. Training would learn another format than rollouts use.\n"
                f"rendered: {tokenizer.decode(ids)!r}\nrollout:  {tokenizer.decode(other)!r}"
            )

    position, n, wanted = len(built), 0, [0] * len(ids)
    expect(ids[:position] == built, "the prompt differs", built)
    expect(not any(mask[:position]), "the loss mask covers the prompt", built)
    while n < len(completion):
        message, at, results = completion[n], n, []
        while n + 1 + len(results) < len(completion) and completion[n + 1 + len(results)]["role"] != "assistant":
            results.append(completion[n + 1 + len(results)])
        n += 1 + len(results)
        rest = ids[position:]
        end = position + (rest.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in rest else 0)
        turn, written = ids[position:end], mask[position:end]
        expect(bool(turn) and opening not in turn, "a turn does not end in the stop token", built)
        expect(bool(written[-1]), "the stop token carries no loss, so the model would not learn to stop", turn)
        expect(all(written), "the loss mask leaves out part of what the model writes", turn)
        parsed = parse(tokenizer, turn, ids[:position], tools)
        if shown[at].get("train", True):
            wanted[position:end] = written
        same = parsed["content"].strip() == message["content"].strip() and (parsed.get("tool_calls") or []) == (
            message.get("tool_calls") or []
        )
        expect(same, f"the parser reads {parsed} where the row says {message}", turn)
        position = end
        if results:
            suffix = tool_suffix(tokenizer, results)
            expect(ids[end : end + len(suffix)] == suffix, "a tool result is rendered otherwise in a rollout", suffix)
            expect(not any(mask[end : end + len(suffix)]), "the loss mask covers a tool result", suffix)
            position = end + len(suffix)
    expect(not any(mask[position:]), "the loss mask covers text after the last turn", built)
    trained = render(tokenizer, row["messages"], tools)
    expect(trained == (ids, wanted), "a wrong turn, shown for the sake of its correction, carries loss", built)


def check_labels(trainer, rows: list[dict]) -> None:
    """What trainer and collator make of the prepared rows: the same tokens carry the loss, and no others.

    `rows` hold `input_ids` and `labels`. Order, padding, packing and shared prompts are the collator's business.
    """
    made = list(trainer.train_dataset)
    if len(made) == len(rows):  # not packed
        made, rows = made[:64], rows[:64]
    found = Counter()
    for start in range(0, len(made), 8):
        found.update(trainer.data_collator(made[start : start + 8])["labels"].flatten().tolist())
    wanted = Counter(label for row in rows for label in row["labels"])
    del found[-100], wanted[-100]
    if wanted != found:
        raise UserError(
            f"self-check: the trainer puts the loss on {found.total()} tokens, the prepared rows on {wanted.total()}. "
            "Something between the rows and the model changes the labels (truncation, a data collator)"
        )


def before_training(
    tokenizer, rows: list[dict], tools: dict, judge, weights: dict[str, float], cheats, skip: bool
) -> None:
    """What can be checked before a model is loaded, on worked rows; `tools[environment]` as prompts show them."""
    if skip:
        print(SKIPPED)
        return
    for row in rows[:32]:
        check_rendering(tokenizer, row, tools[row["environment"]])
    said = f"self-checks pass on {len(rows[:32])} real rows: rendering, loss mask, parser and stop token as in rollouts"
    if weights:
        check_rewards(gold_rows(rows), judge, weights, cheats)
        said += "; gold earns 1.0 and every cheat less"
    print(said)


def gold_rows(rows: list[dict], most: int = 2) -> list[dict]:
    """The first worked examples of each environment, without those that show a mistake first."""
    found: dict[str, list] = {}
    for row in rows:
        if all(message.get("train", True) for message in row["messages"]):
            found.setdefault(row["environment"], []).append(row)
    return [row for group in found.values() for row in group[:most]]


def check_rewards(rows: list[dict], judge, weights: dict[str, float], cheats) -> None:
    """Gold episodes are right (1.0), and no made-up cheat earns what gold earns under the recipe's weights.

    A cheat may guess one row's answer by luck; it fails the check if it wins on more than half of an environment's rows.
    `judge` is the package `rewards`, which core does not import; `cheats(row)` gives episodes that must not pay.
    """

    def total(scores: dict) -> float:
        return sum(weight * (scores.get(name) or 0.0) for name, weight in weights.items())

    wins, asked = Counter(), Counter(row["environment"] for row in rows)
    for row in rows:
        gold = row["messages"][len(row["prompt"]) :]
        name = judge.right_reward(row["environment"], weights)
        needed = set(weights) | {name}
        (scores,) = judge.score_batch([row], [gold], only=needed)
        if scores[name] is None:
            path = row.get("db_path")
            gone = (
                f"There is no {path}: run step2_prepare_data.py in this folder"
                if path and not Path(path).exists()
                else ""
            )
            why = gone or "Is the judge's server there?"
            raise UserError(f"self-check on row {row['id']}: {name} cannot judge gold. {why}")
        if not judge.holds(scores, name):
            raise UserError(
                f"self-check on row {row['id']}: gold earns {name} {scores[name]:.2f} instead of 1.0: training would teach "
                "something else than the right answer. Prepare the data again (step2_prepare_data.py) or mend the reward"
            )
        tries = cheats(row)
        paid = judge.score_batch([row] * len(tries), [cheat.completion for cheat in tries], only=needed)
        for cheat, earned in zip(tries, paid, strict=True):
            wins[row["environment"], cheat.name] += total(earned) >= total(scores)
    liked = sorted(f"{name} ({kind})" for (kind, name), n in wins.items() if 2 * n > asked[kind])
    if liked:
        raise UserError(
            f"self-check: under grpo.rewards {weights} these cheats earn as much as gold: {', '.join(liked[:5])}. "
            "The policy would learn them. Give the reward for being right more weight, or mend the reward"
        )


class AdapterCheck(TrainerCallback):
    """After the first optimizer step that moves weights, the adapter changes what the model says about a real row."""

    def __init__(self, ids: list[int]):
        self.ids, self.moved, self.done = ids, False, False

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        if not (self.done or self.moved or sharded()) and optimizer.param_groups[0]["lr"] > 0:
            self.moved = any(p.grad is not None and bool(p.grad.any()) for p in model.parameters() if p.requires_grad)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if self.done or not self.moved or not hasattr(model, "disable_adapter"):
            return
        from core.models import token_logprobs

        self.done, training = True, model.training
        model.eval()
        on = token_logprobs(model, self.ids)
        with model.disable_adapter():
            off = token_logprobs(model, self.ids)
        model.train(training)
        if bool((on == off).all()):
            raise UserError(
                f"self-check after step {state.global_step}: the adapter's weights were updated, but the model's output is "
                "still the base model's: the adapter is not part of the model that runs. Nothing would be learnt"
            )


TOLERANCE = {"float32": 0.01, "bfloat16": 0.1}  # mean |log-probability, sampler - trainer| of a sampled token
ROUNDING = {"float32": 1e-5, "bfloat16": 0.02}  # what one and the same model differs from itself by
EVERY = 10  # steps between two looks
EPISODES = 4  # looked at each time


class SamplerCheck:
    """Rollouts come from the weights that are trained: looked at with the first two batches and every `EVERY` steps after.

    Compares the log-probabilities with which tokens were sampled with the trainer's own, adapter on and adapter off. The
    gap to `on` has a limit; and of the way from `off` to `on`, the sampler must have gone more than half: one that still
    runs the base model has gone none of it, even while the adapter is so young that the gap alone would not tell.
    """

    def __init__(self, say=print):
        self.say, self.next, self.follows = say, None, None

    def __call__(self, trainer, inputs: list[dict], batch: dict) -> None:
        step, first = trainer.state.global_step, self.next is None
        wrote = (batch["completion_mask"] * batch.get("tool_mask", 1))[:EPISODES].bool()
        if (not first and step < self.next) or not wrote.any():  # nothing that is trained: looked at in the next step
            return
        self.next = step + (1 if first else EVERY)
        whole = str(trainer.model.dtype) == "torch.float32" and not trainer.args.bf16  # autocast computes in bf16
        sampled, dtype = batch.get("sampling_per_token_logps"), "float32" if whole else "bfloat16"
        if sampled is None:
            if first:
                self.say(
                    "WARNING: this sampler gives no log-probabilities: nothing shows that rollouts follow the adapter"
                )
            return
        on, off = _trainer_logps(trainer, batch)
        found = compare_sampler(sampled[:EPISODES][wrote], on[wrote], None if off is None else off[wrote], dtype, step)
        trainer._metrics["train"]["sampler_gap"].append(found["gap"])
        if first:
            self.say(f"self-check: sampler and trainer agree: mean |log-probability| gap {found['gap']:.2g} over "
                     f"{int(wrote.sum())} tokens (limit {TOLERANCE[dtype]} in {dtype})")  # fmt: skip
        if self.follows is None and found["follows"] is not None:
            self.follows = found["follows"]
            self.say(f"self-check at step {step}: the sampler has {self.follows:.0%} of the adapter's effect")


def _trainer_logps(trainer, batch: dict):
    """The trainer's log-probabilities of the first episodes' tokens with its adapter, and without it (None: no adapter)."""
    import torch

    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)[:EPISODES]
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)[:EPISODES]
    model, size = trainer.accelerator.unwrap_model(trainer.model), trainer.args.per_device_train_batch_size

    def logps():
        return trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, batch["completion_ids"].shape[1], batch_size=size
        )[0].float()

    training, off = trainer.model.training, None
    trainer.model.eval()  # no dropout
    with torch.no_grad():
        on = logps()
        if hasattr(model, "disable_adapter"):
            with model.disable_adapter():
                off = logps()
    trainer.model.train(training)
    return on, off


def compare_sampler(sampled, on, off, dtype: str, step: int) -> dict:
    """{"gap": mean |sampled - on|, "follows": share of the adapter's effect, None where that cannot be told (yet)}."""
    known = ~sampled.isnan()  # vLLM leaves out what it could not score
    sampled, on = sampled[known], on[known]
    gap = (sampled - on).abs().mean().item()
    if not gap <= TOLERANCE[dtype]:
        raise UserError(
            f"self-check at step {step}: the sampler's log-probabilities differ from the trainer's by {gap:.3g} on average "
            f"(limit {TOLERANCE[dtype]} in {dtype}): rollouts come from other weights, another precision or temperature than "
            "what is trained, and GRPO would learn from another model's episodes. With vLLM, look at its dtype, at "
            "quantisation and versions (python -m core.doctor --config R), or use --grpo.use_vllm false"
        )
    if off is None:
        return {"gap": gap, "follows": None}
    moved, gone = on - off[known], sampled - off[known]
    effect, noise = moved.square().mean().item() ** 0.5, (sampled - on).square().mean().item() ** 0.5
    if effect < 3 * ROUNDING[dtype] or noise > 0.15 * effect * len(moved) ** 0.5:
        return {"gap": gap, "follows": None}
    follows = (gone * moved).sum().item() / moved.square().sum().item()  # least squares through 0
    if follows < 0.5:
        raise UserError(
            f"self-check at step {step}: the sampler has {follows:.0%} of the adapter's effect: rollouts come from the base "
            "model or from old weights, so what is learnt is never tried. With vLLM this is a failed weight "
            "synchronisation: use the pinned versions, or --grpo.use_vllm false"
        )
    return {"gap": gap, "follows": follows}
