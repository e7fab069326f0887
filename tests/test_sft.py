"""SFT: no row sees another, adapters of every kind merge into what they were, and the best checkpoint is the accurate one."""

import dataclasses
import json

import pytest

torch = pytest.importorskip("torch")

from core import train as training  # noqa: E402
from core.config import Lora, RecipeError, UserError, load_recipe  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer(tiny):
    from core.models import load_tokenizer

    return load_tokenizer(tiny)


def random_rows(lengths=(20, 33, 41, 27), seed=0):
    torch.manual_seed(seed)
    ids = [torch.randint(5, 1000, (n,)).tolist() for n in lengths]
    return [{"input_ids": i, "labels": [-100] * 5 + i[5:]} for i in ids]


def make(tokenizer, folder, model, rows, lora=None, held_out=None, new_tokens=None, **settings):
    from datasets import Dataset
    from trl import SFTConfig

    from core.models import lora_config
    from core.sft import AccuracyTrainer

    defaults = {
        "max_length": None,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
    }
    defaults |= {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "max_steps": 2, "disable_tqdm": True}
    trainer = AccuracyTrainer(
        model,
        SFTConfig(output_dir=str(folder), **(defaults | settings)),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:2]),
        processing_class=tokenizer,
        peft_config=lora_config(lora, model, new_tokens),
    )
    trainer.held_out = held_out
    return trainer


@pytest.mark.parametrize(
    "settings",
    [{}, {"padding_free": True}, {"packing": True, "max_length": 128}, {"train_sampling_strategy": "group_by_length"}],
)
def test_the_loss_of_a_batch_is_that_of_its_rows_alone(tiny, tokenizer, tmp_path, settings):
    """As a tree (our default), and packed, flattened or padded by TRL, all of them through SDPA."""
    from core.models import load_model

    rows, model = random_rows(), load_model(tiny)
    counts = [len(r["input_ids"]) - 5 for r in rows]
    with torch.no_grad():
        alone = [
            model(**{k: torch.tensor([v]) for k, v in r.items()}).loss.item() * n
            for r, n in zip(rows, counts, strict=True)
        ]
        trainer = make(tokenizer, tmp_path, model, rows, **settings)
        batch = next(iter(trainer.get_train_dataloader()))
        together = trainer.compute_loss(trainer.model, batch).item()
    assert together == pytest.approx(sum(alone) / sum(counts), abs=2e-6)


@pytest.mark.parametrize("kind", ["lora", "qlora", "full"])
def test_each_kind_trains_and_merges(tiny, tokenizer, tmp_path, kind):
    from core.models import load_model, save_merged

    lora, rows = None if kind == "full" else Lora(r=4, alpha=8), random_rows()
    model = load_model(tiny, load_in_4bit=kind == "qlora", train_all=kind == "full")
    if kind == "qlora":
        layer = model.model.layers[0].mlp.up_proj.weight
        assert layer.quant_state.quant_type == "nf4" and layer.quant_state.nested  # double quantisation
    trainer = make(tokenizer, tmp_path / "sft", model, rows, lora)
    trainer.train()
    folder, adapter = tmp_path / "sft" / "adapter", None if kind == "full" else tmp_path / "sft" / "adapter"
    trainer.save_model(str(folder))
    found = save_merged(
        str(folder) if kind == "full" else tiny, adapter, tokenizer, tmp_path / "merged", rows[0]["input_ids"]
    )
    assert found["merge_gap"] < 1e-5
    merged = load_model(str(tmp_path / "merged"))
    assert not hasattr(merged.config, "quantization_config") and merged.dtype == torch.float32
    if kind != "full":
        assert found["merge_moved"] > 100 * found["merge_gap"]


def test_a_merge_that_goes_wrong_writes_nothing(tiny, tokenizer, tmp_path, monkeypatch):
    from peft import PeftModel

    from core.models import load_model, save_merged

    rows = random_rows()
    trainer = make(tokenizer, tmp_path / "sft", load_model(tiny), rows, Lora(r=4, alpha=8), learning_rate=0.3)
    trainer.train()
    trainer.model.save_pretrained(str(tmp_path / "adapter"))
    monkeypatch.setattr(PeftModel, "merge_and_unload", lambda self, **_: self.unload(), raising=False)
    with pytest.raises(UserError, match="was not written"):
        save_merged(tiny, tmp_path / "adapter", tokenizer, tmp_path / "merged", rows[0]["input_ids"])
    assert not (tmp_path / "merged").exists()
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    from safetensors.torch import load_file, save_file

    save_file({k: v * float("nan") for k, v in load_file(weights).items()}, weights)
    monkeypatch.undo()
    with pytest.raises((UserError, ValueError), match="was not written|NaN"):
        save_merged(tiny, tmp_path / "adapter", tokenizer, tmp_path / "merged", rows[0]["input_ids"])


class Scripted:
    """Held-out accuracies as given, step by step."""

    def __init__(self, *accuracies):
        self.left = list(accuracies)

    def play(self, trainer):
        return {"accuracy": self.left.pop(0), "tool_use": 1.0}


@pytest.mark.parametrize(("accuracies", "best"), [((0.25, 0.75, 0.5, 0.5), 2), ((0.5, 0.5, 0.5, 0.5), 4)])
def test_the_most_accurate_checkpoint_is_kept_and_loaded(tiny, tokenizer, tmp_path, accuracies, best):
    from safetensors.torch import load_file

    from core.models import load_model
    from core.sft import best_by_accuracy, best_figures

    settings = {"save_steps": 1, "max_steps": 4, "save_total_limit": 2, "learning_rate": 1e-3}
    settings |= best_by_accuracy(settings)
    trainer = make(
        tokenizer, tmp_path, load_model(tiny), random_rows(), Lora(r=4, alpha=8), Scripted(*accuracies), **settings
    )
    trainer.train()
    said = []
    figures = best_figures(trainer, said.append)
    assert (
        figures["best_step"] == best
        and figures["held_out_accuracy"] == max(accuracies)
        and f"kept: step {best}" in said[0]
    )
    assert {p.name for p in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{best}", "checkpoint-4"} | (
        {"checkpoint-3"} if best == 4 else set()
    )
    saved = load_file(tmp_path / f"checkpoint-{best}" / "adapter_model.safetensors")
    held = {k.replace(".default", ""): v for k, v in trainer.model.state_dict().items() if "lora" in k}
    assert saved and all(torch.equal(held[k], v) for k, v in saved.items())
    if best == 2:  # a run that goes on after a crash still knows which one was best
        again = make(
            tokenizer, tmp_path, load_model(tiny), random_rows(), Lora(r=4, alpha=8), Scripted(0.1), **settings
        )
        again.train(resume_from_checkpoint=training.last_checkpoint(tmp_path, say=said.append))
        assert best_figures(again, said.append)["best_step"] == 2


def test_a_start_that_was_refused_leaves_nothing_to_set_aside(tmp_path):
    folder, said = tmp_path / "sft", []
    assert not training.is_finished(folder, {"sft": 1}, say=said.append)
    assert not training.is_finished(folder, {"sft": 2}, say=said.append) and not said
    (folder / "checkpoint-2").mkdir()
    assert not training.is_finished(folder, {"sft": 3}, say=said.append) and "another sft: set aside" in said[0]


def test_checkpoints_of_another_number_of_processes_stay(tmp_path, monkeypatch):
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
        for process in range(2):
            (tmp_path / f"checkpoint-{step}" / f"rng_state_{process}.pth").touch()
    for processes in (1, 3):
        monkeypatch.setattr(training, "world", lambda n=processes: n)
        with pytest.raises(UserError, match=f"written by 2 processes, this run has {processes}"):
            training.last_checkpoint.__wrapped__(tmp_path)
    (tmp_path / "checkpoint-4" / "rng_state_1.pth").unlink()  # killed while writing, and so not whole
    monkeypatch.setattr(training, "world", lambda: 2)
    training.last_checkpoint.__wrapped__(tmp_path, say=lambda _: None)
    assert not (tmp_path / "checkpoint-4").exists()


def test_held_out_rows_are_played_with_the_weights_of_now(tiny, tokenizer, tmp_path, worked_rows):
    """The real loop: a model overfitted on two rows answers them, through the environment."""
    import rewards
    from core.chat import schemas_of
    from core.health import Samples
    from core.held_out import HeldOut
    from core.models import load_model
    from core.sft import labelled
    from envs import ENVIRONMENTS

    recipe = load_recipe("recipes/ci.yaml", ["--agent.max_completion_length", "120"])
    samples = Samples(tmp_path, recipe.agent, rewards)
    row = worked_rows[1]
    rows = [labelled(tokenizer, row, schemas_of(ENVIRONMENTS["calculator"]()))]
    settings = {"max_steps": 60, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    trainer = make(tokenizer, tmp_path, load_model(tiny, train_all=True), rows * 2, **settings)
    trainer.held_out = HeldOut([row], tokenizer, recipe, lambda row: ENVIRONMENTS["calculator"](), samples)
    assert trainer.held_out.play(trainer) == {"accuracy": 0.0, "tool_use": 0.0}
    trainer.train()
    assert trainer.held_out.play(trainer) == {"accuracy": 1.0, "tool_use": 1.0}
    kept = [json.loads(line) for line in samples.path.read_text().splitlines()]
    assert [(r["step"], r["correct"]) for r in kept] == [(0, False), (60, True)] and kept[1]["mask"]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def coder(tiny, tmp_path_factory, request):
    """A base as Qwen2.5-Coder: `<tool_call>` is in the vocabulary, with the rows of ids that nobody uses."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("coder")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=False)
    config = AutoConfig.from_pretrained(tiny)
    config.vocab_size, config.tie_word_embeddings = len(tokenizer) + 20, request.param
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    dead = tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"]) + list(
        range(len(tokenizer), config.vocab_size)
    )
    for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        weight.data[dead] = torch.randn(config.hidden_size) * 0.02 + torch.randn(len(dead), config.hidden_size) * 1e-5
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_untrained_call_tokens_are_found_and_learnt(coder, tiny, tokenizer, tmp_path):
    from core.models import load_model, load_tokenizer, save_merged, untrained_tokens

    assert untrained_tokens(load_model(tiny), tokenizer) == []  # no such tokens, no such rows
    tokenizer, model = load_tokenizer(coder), load_model(coder)
    dead = untrained_tokens(model, tokenizer)
    assert tokenizer.convert_ids_to_tokens(dead) == ["<tool_call>", "</tool_call>"]
    named = load_tokenizer(coder)
    named.add_tokens([f"[PAD{i}]" for i in range(len(named), model.config.vocab_size)])  # as a GGUF's vocabulary
    assert untrained_tokens(model, named) == dead
    rows = random_rows()
    for row in rows:
        row["input_ids"][10], row["input_ids"][14] = dead
        row["labels"] = [-100] * 5 + row["input_ids"][5:]
    trainer = make(tokenizer, tmp_path, model, rows, Lora(r=4, alpha=8), new_tokens=dead, max_steps=3)
    deltas = {n: p for n, p in trainer.model.named_parameters() if "trainable_tokens_delta" in n}
    assert len(deltas) == (1 if model.config.tie_word_embeddings else 2)

    # TRL's fused head must give these rows the gradient that the plain logits give them
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.compute_loss(trainer.model, batch).backward()
    fused = {n: p.grad.clone() for n, p in deltas.items()}
    trainer.model.zero_grad()
    count = sum(label != -100 for row in rows for label in row["labels"])
    for row in rows:
        inputs = {k: torch.tensor([v]) for k, v in row.items()}
        (trainer.model(**inputs).loss * (len(row["labels"]) - 5) / count).backward()
    for name, p in deltas.items():
        assert p.grad.abs().max() > 1e-4
        torch.testing.assert_close(fused[name], p.grad, rtol=1e-3, atol=1e-6)
    trainer.model.zero_grad()

    trainer.train()
    trainer.model.save_pretrained(str(tmp_path / "adapter"))
    found = save_merged(coder, tmp_path / "adapter", tokenizer, tmp_path / "merged", rows[0]["input_ids"])
    merged, base = load_model(str(tmp_path / "merged")), load_model(coder)
    assert found["merge_gap"] < 1e-5 and untrained_tokens(merged, tokenizer) == []
    for part in ("get_input_embeddings", "get_output_embeddings"):
        new, old = getattr(merged, part)().weight, getattr(base, part)().weight
        changed = (new != old).any(1).nonzero()[:, 0].tolist()
        assert changed == sorted(dead)


def test_a_stage_is_taken_over_only_as_the_same_experiment(tmp_path):
    recipe, data = load_recipe("recipes/ci.yaml", ["--checkpoint_root", str(tmp_path)]), tmp_path / "sft_train.jsonl"
    data.write_text("{}\n")
    folder, said = recipe.run_dir / "sft", []

    def finished(recipe, **options):
        said.clear()
        return training.is_finished(folder, training.experiment(recipe, "sft", [data]), say=said.append, **options)

    def finish():
        training.write_manifest(folder, recipe, [data], 0.0)

    def section(**changes):
        return dataclasses.replace(recipe, sft=dataclasses.replace(recipe.sft, **changes))

    assert not finished(recipe) and not said
    (folder / "checkpoint-1").mkdir()
    assert not finished(recipe) and (folder / "checkpoint-1").exists() and not said  # half done: it goes on
    assert not finished(section(lora=Lora(r=8, alpha=8))) and "another sft: set aside as" in said[0]
    assert not (folder / "checkpoint-1").exists() and (tmp_path / "ci" / "sft.before-1" / "checkpoint-1").exists()
    assert not finished(recipe) and "another sft" in said[0] and (tmp_path / "ci" / "sft.before-2").exists()
    finish()
    assert finished(recipe) and "finished already" in said[0]
    # what does not change the weights is no reason: another section, the tracker, how often is saved, the tasks' folders
    assert finished(dataclasses.replace(recipe, grpo=dataclasses.replace(recipe.grpo, load_in_4bit=True)))
    assert finished(section(config=recipe.sft.config | {"report_to": "none", "save_steps": 7}))
    assert finished(dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, eval=3, roots={"gsm8k": "x"})))
    moved = tmp_path / "elsewhere" / data.parent.name / data.name
    moved.parent.mkdir(parents=True)
    moved.write_text("{}\n")
    assert training.is_finished(folder, training.experiment(recipe, "sft", [moved]), say=said.append)
    data.write_text('{"changed": 1}\n')
    assert not finished(recipe) and "sft_train.jsonl: set aside" in said[0] and not (folder / "manifest.json").exists()
    finish()
    assert not finished(recipe, restart=True) and not (folder / "manifest.json").exists()


@pytest.mark.parametrize(
    "change, said",
    [({"lr_scheduler_type": "nonsense"}, "SchedulerType"), ({"optim": "adamww"}, "adamww"),
     ({"report_to": "wandbb"}, "wandbb"), ({"loss_type": "dapoo"}, "Did you mean 'dapo'"), ({}, None)],
)  # fmt: skip
def test_what_trl_refuses_is_said_as_a_mistake_in_the_recipe(tmp_path, change, said):
    from trl import GRPOConfig

    config = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False} | change
    if said is None:
        assert training.arguments(GRPOConfig, "grpo", config).output_dir == str(tmp_path)
        return
    with pytest.raises(RecipeError, match=said):
        training.arguments(GRPOConfig, "grpo", config)


def test_wandb_goes_offline_without_a_key(tmp_path, monkeypatch):
    names = ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR", "WANDB_PROJECT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # so that what is set below is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    import os

    training.trackers(tmp_path, "tensorboard")
    assert "WANDB_MODE" not in os.environ
    training.trackers(tmp_path, ["tensorboard", "wandb"])
    assert os.environ["WANDB_MODE"] == "offline" and os.environ["WANDB_DIR"] == str(tmp_path)
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "x")
    training.trackers(tmp_path, "wandb")
    assert os.environ["WANDB_MODE"] == "online"
