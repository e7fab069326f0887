"""TRL's GRPOTrainer with the loss of a group computed as a tree: the prompt that its episodes share is read once."""

import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer
from trl.trainer.utils import split_tensor_dict

from core.config import UserError
from core.health import Observed
from core.ranks import Lockstep
from core.resample import Resampling
from core.tools import ConcurrentTools
from core.tree import attend_in_tree, pack, packs_exactly, score_labelled_positions_only

PATIENCE = 3  # batches of which nothing could be judged


class GroupTrainer(Lockstep, ConcurrentTools, Resampling, Observed, GRPOTrainer):
    main_reward = None  # environment -> name of the reward without which nobody knows whether an episode is right

    def __init__(self, *args, **kwargs):
        score_labelled_positions_only()
        super().__init__(*args, **kwargs)
        self._unjudged = 0  # batches in a row
        base = self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model
        self.as_tree = packs_exactly(base.config)
        self.leaves_out = loss_is_a_sum_over_tokens(self.args) and not self.aux_loss_enabled
        if self.as_tree:
            attend_in_tree(base)
            if self.ref_model is not None:
                attend_in_tree(self.ref_model)

    def _generate(self, *args, **kwargs):
        try:
            return super()._generate(*args, **kwargs)
        finally:
            if forget := getattr(self.model.generate, "forget", None):  # core/decode.py: training needs the memory
                forget()

    def _calculate_rewards(self, inputs, *args):
        """Rewards, all NaN for an episode that could not be judged, which leaves it out: no failure counts as wrong.

        TRL leaves out only what no reward function could judge; a single None would count as 0 in the sum.
        """
        rewards = super()._calculate_rewards(inputs, *args)
        missing = rewards.isnan().view(-1, self.num_generations, rewards.shape[1])
        undecided = (missing & ~missing.all(1, keepdim=True)).any(-1).flatten()  # others of its group have that reward
        main = [self.main_reward(row["environment"]) if self.main_reward else "" for row in inputs]
        places = [self.reward_func_names.index(name) if name in self.reward_func_names else -1 for name in main]
        troubled = [bool(getattr(env, "trouble", "")) for env in self.environments or inputs]  # its database was away
        for n, (place, trouble) in enumerate(gather_object(list(zip(places, troubled, strict=True)))):
            undecided[n] |= trouble or (place >= 0 and rewards[n, place].isnan())
        rewards[undecided] = torch.nan
        self._unjudged = self._unjudged + 1 if undecided.all() else 0
        if self._unjudged == PATIENCE:
            raise UserError(
                f"no episode of the last {PATIENCE} batches could be judged: {', '.join(sorted(set(main)))} gave no verdict. "
                "See whether the databases and the judge (JUDGE_BASE_URL) are there; the same command goes on from the "
                "last checkpoint"
            )
        return rewards

    def _compute_loss(self, model, inputs):
        """As TRL's, without the episodes that have no advantage where these add nothing to loss and gradient.

        The entropy in the log is then that of the others.
        """
        teach = inputs["advantages"].abs() > 1e-6
        if self.leaves_out and model.training and self.accelerator.num_processes == 1 and not teach.all():
            teach[0] |= not teach.any()  # something to call backward on
            inputs = {k: v if v is None or v.ndim == 0 else v[teach] for k, v in inputs.items()}
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **kwargs
    ):
        """Log-probabilities (and entropies) of the completions: (rows, logits_to_keep), zero where there is padding."""
        if not self.as_tree:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, **kwargs
            )
        parts = [
            self._score(model, ids, mask.bool(), logits_to_keep)
            for ids, mask in zip(
                input_ids.split(batch_size or len(input_ids)),
                attention_mask.split(batch_size or len(input_ids)),
                strict=True,
            )
        ]
        logps, entropies = (torch.cat(part) for part in zip(*parts, strict=True))
        return logps, entropies if compute_entropy else None, None

    def _score(self, model, input_ids, mask, logits_to_keep):
        rows = [ids[m].tolist() for ids, m in zip(input_ids, mask, strict=True)]
        written = mask[:, -logits_to_keep:]
        lengths = written.sum(1).tolist()
        tree = pack(rows, [len(row) - n - 1 for row, n in zip(rows, lengths, strict=True)])
        places = [i for path, n in zip(tree.paths, lengths, strict=True) for i in path[len(path) - n :]]
        places = torch.tensor(places, dtype=torch.long, device=input_ids.device)  # none where all is masked
        inputs = tree.tensors(input_ids.device)
        labels = torch.full_like(inputs["input_ids"], -100)
        labels[0, places] = inputs["input_ids"][0, places]
        with self.accelerator.autocast():
            outputs = model(**inputs, labels=labels, fused_lm_head=True)
        found = (outputs.log_probs, outputs.entropy)  # entry i scores token i + 1
        return [x.new_zeros(written.shape).masked_scatter(written, x[0, places - 1]) for x in found]

    def _prepare_inputs(self, generation_batch):
        """As TRL's, but groups are shuffled and not their rows, so that a micro-batch holds what shares a prompt.

        Where one optimizer step takes the whole generation batch, as by default, the order changes no gradient.
        """
        if not self.as_tree or not self.model.training:
            return super()._prepare_inputs(generation_batch)
        steps = self.args.steps_per_generation
        if self._step % (steps * self.num_iterations) == 0 or self._buffered_inputs is None:
            batch = self._generate_and_score_completions(generation_batch)
            groups = torch.arange(len(batch["completion_ids"])).split(self.num_generations)
            order = torch.cat([groups[i] for i in torch.randperm(len(groups)).tolist()])
            batch = {k: v if v is None or v.ndim == 0 else v[order.to(v.device)] for k, v in batch.items()}
            self._buffered_inputs = split_tensor_dict(batch, steps)
        return self._buffered_inputs[self._step % steps]


def loss_is_a_sum_over_tokens(args) -> bool:
    """Divided by what no row of the micro-batch changes, and nothing in it but advantage times likelihood."""
    alone = args.beta == 0 and args.entropy_coef == 0 and not args.use_adaptive_entropy
    return args.loss_type in ("dapo", "cispo") and alone and args.top_entropy_quantile == 1
