"""Groups that are all right or all wrong are replaced by groups of other prompts, up to a number of extra rounds.

TRL generates the batch of a step, scores it and computes advantages within each group; here the same method is called
again for as many other prompts as there are such groups, and the groups with right and wrong episodes take their places
(the dynamic sampling of DAPO, with a bound). TRL 1.16 has no such mechanism of its own. What counts is the heaviest
reward: with shaping rewards nearly every group has some spread in its total, and learns nothing but format from it.

Rewards, lengths and tool figures in the log stay those of the first round: what the policy earns on the prompts as they
come. Under names of their own:

    resample/useful        share of groups with spread in the batch that is trained on; logged without resampling, too
    resample/replaced      share of groups that were replaced
    resample/extra_tokens  tokens that the policy wrote in the extra rounds
"""

import copy
import heapq
import random
from collections import defaultdict

import torch
from accelerate.utils import gather_object

from core.config import UserError


class Resampling:
    """Mixin for GRPOTrainer; its training rows have `id` and `difficulty`."""

    resample = 0  # extra rounds a generation batch, at most

    def _calculate_rewards(self, *args):
        self._rewards = super()._calculate_rewards(*args)  # (episodes of all processes, reward functions)
        return self._rewards

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        if self.model.training:
            flat = ~self._spread()
            if self.resample:
                self._replace(flat.view(self.accelerator.num_processes, -1), inputs, batch)
            self._metrics["train"]["resample/useful"].append(1 - flat.float().mean().item())
        return batch

    def _replace(self, flat: torch.Tensor, inputs: list[dict], batch: dict) -> None:
        """flat: (processes, groups of a process); what is replaced is no longer flat."""
        size, rank = self.num_generations, self.accelerator.process_index
        seen = set(gather_object([row["id"] for row in inputs]))
        replaced, extra_tokens = 0, 0.0
        for number in range(self.resample):
            wanted = int(flat.sum(1).max())  # as many on every process: TRL expects equal shares
            rows = self._other_prompts(wanted * len(flat), seen, number)
            share = len(rows) // len(flat)
            if not share:
                break
            mine = rows[rank * share : (rank + 1) * share]
            extra, tokens = self._generate_apart(
                [dict(row) for row in mine for _ in range(size)]
            )  # TRL writes into them
            extra_tokens += tokens
            found = self._spread().view(len(flat), -1)
            for process in range(len(flat)):
                places, sources = flat[process].nonzero()[:, 0].tolist(), found[process].nonzero()[:, 0].tolist()
                pairs = list(zip(places, sources, strict=False))
                if process == rank and pairs:
                    self._put(batch, extra, pairs)
                flat[process, [place for place, _ in pairs]] = False
                replaced += len(pairs)
            if not flat.any():
                break
        if replaced:
            mask = batch["completion_mask"] * batch.get("tool_mask", 1)
            batch["num_items_in_batch"] = self.accelerator.gather(mask.sum()).sum()
        self._metrics["train"]["resample/replaced"].append(replaced / flat.numel())
        self._metrics["train"]["resample/extra_tokens"].append(extra_tokens)

    def _spread(self) -> torch.Tensor:
        """Which groups of the last call, of all processes, differ in the heaviest reward that they have (the first of equals)."""
        order = self.reward_weights.argsort(descending=True, stable=True).cpu()
        groups = self._rewards.cpu()[:, order].view(-1, self.num_generations, len(order))
        main = (~groups.isnan()).any(1).int().argmax(1)  # of rewards that do not apply there are no values
        values = groups[torch.arange(len(groups)), :, main]
        return values.nan_to_num(-torch.inf).amax(1) - values.nan_to_num(torch.inf).amin(1) > 1e-6

    def _other_prompts(self, count: int, seen: set, number: int) -> list[dict]:
        """Prompts that this step has not had, the likelier the more their groups are expected to differ.

        A function of seed, step and the prompts of the step alone, so that a resumed run draws the same.
        """
        draw = random.Random(f"{self.args.seed}-{self.state.global_step}-{number}-{sorted(seen)}")
        ids, difficulties = self._prompt_columns()
        keys = [
            (draw.random() ** (1 / _chance_of_spread(d, self.num_generations)), i)
            for i, d in enumerate(difficulties)
            if ids[i] not in seen
        ]
        chosen = [i for _, i in heapq.nlargest(count, keys)]
        seen.update(ids[i] for i in chosen)
        return [self.train_dataset[i] for i in chosen]

    def _prompt_columns(self) -> tuple[list, list]:
        if not hasattr(self, "_columns"):
            self._columns = list(self.train_dataset["id"]), list(self.train_dataset["difficulty"])
        return self._columns

    def _generate_apart(self, inputs: list[dict]) -> tuple[dict, float]:
        """One more round, kept out of the log; and the tokens the policy wrote in it."""
        metrics, logs = self._metrics["train"], copy.deepcopy(self._logs)
        self._metrics["train"] = apart = defaultdict(list)
        batch = super()._generate_and_score_completions(inputs)
        self._metrics["train"], self._logs = metrics, logs
        metrics["num_tokens"] = apart["num_tokens"]  # a total, not a mean
        episodes = len(inputs) * self.accelerator.num_processes
        return batch, apart["completions/mean_length"][0] * episodes

    def _put(self, batch: dict, extra: dict, pairs: list[tuple[int, int]]) -> None:
        """Groups of `extra` in the places of groups of `batch`; whichever is narrower is padded as TRL pads it."""
        steps = torch.arange(self.num_generations)
        places, sources = (
            torch.cat([g * self.num_generations + steps for g in groups]) for groups in zip(*pairs, strict=True)
        )
        for key, value in batch.items():
            if key == "num_items_in_batch":
                continue
            other = extra[key]
            if value.ndim == 2:
                width = max(value.shape[1], other.shape[1])
                fill = self._tokenizer.pad_token_id if key.endswith("_ids") else 0
                value, other = (_widened(v, width, fill, left=key.startswith("prompt")) for v in (value, other))
            value = value.clone()
            value[places.to(value.device)] = other[sources.to(other.device)].to(value.dtype)
            batch[key] = value


def check_settings(args) -> None:
    """Resampling needs advantages that depend on nothing outside the group, and whole groups in every process."""
    if args.scale_rewards == "batch" or args.multi_objective_aggregation != "sum_then_normalize":
        raise UserError(
            f"grpo.resample replaces groups, so advantages must be computed within a group: scale_rewards is "
            f"'{args.scale_rewards}' and multi_objective_aggregation '{args.multi_objective_aggregation}'; set "
            "--grpo.scale_rewards group --grpo.multi_objective_aggregation sum_then_normalize, or --grpo.resample 0"
        )
    local = args.per_device_train_batch_size * args.steps_per_generation
    if local % args.num_generations:
        raise UserError(
            f"grpo.resample needs whole groups in every process: {local} episodes a process do not divide by "
            f"num_generations={args.num_generations}; change gradient_accumulation_steps, or --grpo.resample 0"
        )


def _chance_of_spread(difficulty: float, episodes: int) -> float:
    """That a group has a right and a wrong episode. Never certain: a few samples, or a guess, are behind the figure."""
    right = min(max(1 - difficulty, 0.05), 0.95)
    return 1 - right**episodes - (1 - right) ** episodes


def _widened(value: torch.Tensor, width: int, fill: int, left: bool) -> torch.Tensor:
    gap = width - value.shape[1]
    return torch.nn.functional.pad(value, (gap, 0) if left else (0, gap), value=fill)
