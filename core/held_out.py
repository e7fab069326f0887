"""Accuracy while training: held-out rows played in their environment with the weights as they are, and judged as in step 5."""

from collections.abc import Callable

from transformers import TrainerCallback

from core.config import Recipe, UserError
from core.health import Samples
from core.rollout import Episode, TransformersEngine


class HeldOut:
    """Plays its rows greedily; some of the episodes go into samples.jsonl."""

    def __init__(self, rows: list[dict], tokenizer, recipe: Recipe, make_env: Callable, samples: Samples):
        self.rows, self.tokenizer, self.recipe = rows, tokenizer, recipe
        self.make_env, self.samples = make_env, samples  # make_env(row): an environment for it

    def play(self, trainer) -> dict[str, float]:
        """Shares of the rows: right ones (`accuracy`), and ones with a tool call that parsed (`tool_use`)."""
        from accelerate.utils import gather_object

        model, accelerator = trainer.accelerator.unwrap_model(trainer.model), trainer.accelerator
        training = model.training
        engine = TransformersEngine(model, self.tokenizer, self.recipe.eval.batch_size)  # puts the model into eval mode
        mine = self.rows[accelerator.process_index :: accelerator.num_processes]
        records = []
        for batch in engine.play([Episode(row, self.make_env(row), self.tokenizer, self.recipe.agent) for row in mine]):
            records += self.samples.records_of(batch)
        model.train(training)
        records = gather_object(records)
        if accelerator.is_main_process:
            self.samples.add(trainer.state.global_step, records[: self.samples.count])
        judged = [r["correct"] for r in records if r["correct"] is not None]
        if 2 * len(judged) <= len(records):
            raise UserError(
                f"{len(records) - len(judged)} of {len(records)} held-out episodes could not be judged, so this checkpoint "
                "has no accuracy. Is the judge (JUDGE_BASE_URL) up? The same command goes on from the last checkpoint"
            )
        return {
            "accuracy": sum(judged) / len(judged),
            "tool_use": sum(r["tool_calls"] > 0 for r in records) / len(records),
        }


class HeldOutDuringGrpo(TrainerCallback):
    """Plays the same held-out rows at every save of GRPO, where only the reward is known otherwise."""

    def __init__(self, trainer, held_out: HeldOut):
        self.trainer, self.held_out = trainer, held_out

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % state.save_steps == 0:
            for name, value in self.held_out.play(self.trainer).items():
                self.trainer._metrics["train"][f"held_out/{name}"].append(value)
