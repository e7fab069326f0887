"""SFT's own part: rows as labelled tokens, and the best checkpoint by accuracy in the environment instead of by loss."""

from pathlib import Path

from trl import SFTTrainer

from core.chat import render
from core.config import RecipeError
from core.held_out import HeldOut
from core.tree import attend_in_tree, collate, packs_exactly, score_labelled_positions_only


def labelled(tokenizer, row: dict, tools: list) -> dict:
    """A row's ids, with a label where the loss is: what the model itself writes."""
    ids, mask = render(tokenizer, row["messages"], tools)
    return {"input_ids": ids, "labels": [i if m else -100 for i, m in zip(ids, mask, strict=True)]}


class AccuracyTrainer(SFTTrainer):
    """TRL's SFTTrainer whose evaluation also plays; the Trainer's own best-model mechanism then goes by `eval_score`."""

    held_out: HeldOut | None = None

    def __init__(self, model, args, **kwargs):
        score_labelled_positions_only()
        if packs_exactly(model.config) and not (args.packing or args.padding_free):
            attend_in_tree(model)
            kwargs["data_collator"] = collate
        super().__init__(model=model, args=args, **kwargs)
        head = self.model.get_output_embeddings()
        if not hasattr(head, "bias"):  # TRL asks for it; PEFT's wrapper of trained rows does not pass it on
            head.bias = head.original_module.bias

    def evaluate(self, *args, **kwargs):
        played = self.held_out.play(self) if self.held_out else {}
        for name, value in played.items():
            self._metrics["eval"][name].append(value)
        metrics = super().evaluate(*args, **kwargs)
        if played:  # among equally accurate ones the lower loss: less than one row's worth
            loss = metrics["eval_loss"]
            metrics["eval_score"] = played["accuracy"] - 1e-4 * loss / (1 + loss)
        return metrics


def best_by_accuracy(config: dict) -> dict:
    """SFTConfig fields: evaluate at every save, keep the best checkpoint beside the newest, load it at the end."""
    if config.get("save_strategy") == "no":
        raise RecipeError(
            "sft.accuracy_rows keeps the best checkpoint, and sft.save_strategy is 'no': set it to steps, or the other to 0"
        )
    return {
        "eval_strategy": config.get("save_strategy", "steps"),
        "eval_steps": config.get("save_steps", 500),
        "metric_for_best_model": "eval_score",
        "greater_is_better": True,
        "load_best_model_at_end": True,
    }


def best_figures(trainer, say=print) -> dict:
    """Held-out figures of the weights that the trainer holds at the end."""
    if trainer.held_out is None:
        return {"held_out_loss": trainer.evaluate()["eval_loss"]}
    state = trainer.state
    played = [log for log in state.log_history if "eval_accuracy" in log]
    best = next((log for log in played if log["step"] == state.best_global_step), None)
    if best is None or not Path(state.best_model_checkpoint).is_dir():  # none: no figure was a number
        say(f"WARNING: {state.best_model_checkpoint}, the most accurate checkpoint, is gone: the last weights are kept")
        best = played[-1]
    say("held-out accuracy by step: " + ", ".join(f"{log['step']}: {log['eval_accuracy']:.1%}" for log in played)
        + f"; kept: step {best['step']}")  # fmt: skip
    return {
        "held_out_loss": best["eval_loss"],
        "held_out_accuracy": best["eval_accuracy"],
        "held_out_tool_use": best["eval_tool_use"],
        "best_step": best["step"],
    }
