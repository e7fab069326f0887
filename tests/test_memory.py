"""Predictions against what is counted, and what happens when memory runs out for real."""

import contextlib
import copy
import dataclasses
import json
from pathlib import Path

import pytest

from core import fit
from core.config import UserError, load_recipe
from core.memory import Batch, _rollouts, batch_of, predict, report, stage_config, step_time
from core.sizes import ARCHITECTURES, GPUS, Architecture, Device, device

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*gb.yaml"))
PUBLISHED = {  # parameters, as the model cards say
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-Coder-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
}


@pytest.fixture
def recipe(tmp_path):
    return load_recipe(ROOT / "recipes/spider-qwen2.5-coder-1.5b-24gb.yaml", ["--data_root", str(tmp_path)])


def test_the_estimate_stands_beside_what_was_measured(tmp_path):
    """On CPU too: what the run's own stages took, the time of rollouts just played, and what is assumed."""
    words = ["--checkpoint_root", str(tmp_path), "--data_root", str(tmp_path)]
    recipe, cpu = load_recipe(ROOT / "recipes/demo.yaml", words), Device("cpu, 2 cores", 8.0, kind="cpu")
    said = "\n".join(report(recipe, cpu))
    assert "measured on" not in said and " s a step" not in said and "Calculated for this CPU: 0.75 GiB" in said
    rows = [{"step": n, "time": 60.0 * n, "step_time": 58.0 + n, "memory_gib": 4.0 + n / 10} for n in range(1, 4)]
    folder = recipe.run_dir / "grpo"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert "measured in a run that is not finished: peak 4.3 GiB, 60.0 s a step" in "\n".join(report(recipe, cpu))
    manifest = {"recipe": recipe.to_dict(), "device": "cpu (2 cores)", "memory": {"peak_gib": 2.4, "memory_gib": 5.0}}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"seconds": 1.0}))
    recipe.agent = dataclasses.replace(recipe.agent, max_turns=7)
    said = "\n".join(report(recipe, cpu, rollout=0.5))
    assert (
        "measured on cpu (2 cores), with other settings of agent: peak 5.0 GiB, predicted then 2.4, 60.0 s a step"
        in said
    )
    assert "about 16.0 s a step for its 32 rollouts at 0.50 s each" in said


def test_the_table_has_every_model_with_its_published_size():
    assert {load_recipe(f).model for f in (ROOT / "recipes").glob("*.yaml")} <= set(ARCHITECTURES)
    assert {name: arch.parameters for name, arch in ARCHITECTURES.items()} == PUBLISHED


@pytest.mark.parametrize("file", RECIPES, ids=lambda f: f.stem)
def test_recipes_fit_the_gpu_they_are_named_after(file):
    recipe = load_recipe(file)
    on = GPUS["3090"] if recipe.run.endswith("-24gb") else GPUS["A100-80"]
    for stage in ("sft", "grpo"):
        assert predict(recipe, stage, on).peak < 0.95 * on.gib
        assert 0.1 < sum(step_time(recipe, stage, on).parts.values()) < 300


def test_settings_move_the_prediction_as_they_move_memory(recipe):
    on, base = GPUS["3090"], predict(recipe, "grpo", GPUS["3090"])
    awake, server, dense, four_bit, whole = (copy.deepcopy(recipe) for _ in range(5))
    awake.grpo.config["vllm_enable_sleep_mode"] = False
    server.grpo.config["vllm_mode"] = "server"
    dense.grpo.config |= {"activation_checkpointing": False, "vllm_mode": "server"}
    four_bit.grpo.load_in_4bit = True
    whole.grpo.lora = None
    predicted = {n: predict(r, "grpo", on) for n, r in locals().items() if hasattr(r, "grpo")}
    assert predicted["awake"].peak > base.peak > predicted["server"].peak < predicted["dense"].peak
    assert base.parts["weights"] / predicted["four_bit"].parts["weights"] > 2.2
    arch = ARCHITECTURES[recipe.model]
    optimizer = predicted["whole"].parts["optimizer"] * 2**30
    assert optimizer == pytest.approx(arch.parameters * 2 * 4)  # two states of float32 weights


def test_predicts_the_engine_that_step_4_takes(recipe, monkeypatch):
    """The backend's own fields: asleep unless told otherwise, vLLM where nothing is said, as far as it is there."""
    on, here = GPUS["3090"], Device("a card of this machine", 23.6)
    unsaid, silent = copy.deepcopy(recipe), copy.deepcopy(recipe)
    del unsaid.grpo.config["vllm_enable_sleep_mode"]
    assert predict(unsaid, "grpo", on) == predict(recipe, "grpo", on)
    assert "sleep_mode" not in fit.advice(unsaid, "grpo", on, by_itself=True)
    del silent.grpo.config["use_vllm"]
    for there, on_this in ((True, {"vLLM"}), (False, {"KV cache"})):
        monkeypatch.setattr("core.backend.vllm_installed", lambda there=there: there)
        assert _moment(recipe, on) == {"vLLM"}  # --gpu: the recipe names it, so that machine has it
        assert _moment(recipe, here) == _moment(silent, here) == _moment(silent, on) == on_this
        said = "\n".join(report(silent, on))
        assert f"rollouts by {'vLLM in' if there else 'transformers'}" in said
        assert f"assumed: grpo.use_vllm is not set, and vLLM is{'' if there else ' not'} installed here" in said
        assert "assumed" not in "\n".join(report(recipe, on) + report(silent, here))


def _moment(recipe, on) -> set[str]:
    """What the rollouts of the prediction need memory for."""
    config, _ = stage_config(recipe, "grpo", on)
    found = _rollouts(config, ARCHITECTURES[recipe.model], batch_of(recipe, "grpo"), 2, on)
    return set(found) & {"vLLM", "KV cache"}


def test_micro_batch_shrinks_and_the_optimizer_step_stays(recipe):
    seen, now = [], recipe
    now.grpo.config |= {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    while now:
        config, batch = now.grpo.config, batch_of(now, "grpo")
        seen.append(batch.rows)
        assert batch.rows * batch.accumulation == 24 and batch.generated == 48
        assert config["per_device_train_batch_size"] * config["steps_per_generation"] % config["num_generations"] == 0
        assert fit.whatever_fits(now.to_dict()) == fit.whatever_fits(recipe.to_dict())
        now = fit.halved(now, "grpo")
    assert seen == [12, 6, 3, 1]
    other = copy.deepcopy(recipe)
    other.grpo.config["gradient_accumulation_steps"] = 3
    assert fit.whatever_fits(other.to_dict()) != fit.whatever_fits(recipe.to_dict())


def test_auto_fit_before_the_start(recipe, monkeypatch):
    said = []
    monkeypatch.setattr(fit, "device", lambda: Device("small", 6.5, kind="cuda"))
    with fit.fitted(copy.deepcopy(recipe), "sft", False, said.append):
        pass
    assert "warning" in said[-1] and "--sft.gradient_accumulation_steps 8 (now 4)" in said[-1]
    with fit.fitted(recipe, "sft", True, said.append):
        assert recipe.sft.config["per_device_train_batch_size"] < 8
    assert predict(recipe, "sft", Device("small", 6.5)).peak <= 6.5 and "warning" not in said[-1]


def test_auto_fit_leaves_alone_what_it_cannot_mend(recipe, monkeypatch):
    monkeypatch.setattr(fit, "device", lambda: Device("tiny", 2.0, kind="cuda"))
    said = []
    with fit.fitted(recipe, "grpo", True, said.append):  # vLLM's share is the peak: no micro-batch changes it
        assert recipe.grpo.config["per_device_train_batch_size"] == 8 or "warning" in said[-1]
    assert "warning" in said[-1]


def test_only_running_out_of_memory_is_explained(recipe, monkeypatch):
    monkeypatch.setattr(fit, "device", lambda: GPUS["3090"])
    with pytest.raises(ZeroDivisionError), fit.fitted(recipe, "sft", False, lambda _: None):
        raise ZeroDivisionError
    with pytest.raises(UserError) as error, fit.fitted(recipe, "grpo", True, lambda _: None):
        raise ValueError("Free memory on device is less than desired. Decrease gpu_memory_utilization")  # vLLM's own
    assert "vllm_gpu_memory_utilization 0.35 (now 0.45)" in str(error.value) and len(str(error.value).split("\n")) == 5


@pytest.mark.parametrize(
    ("processes", "auto_fit", "says"),
    [(1, False, "--auto_fit does this by itself"), (2, False, ""), (2, True, "--auto_fit acts before the start only")],
)
def test_advice_says_of_auto_fit_what_it_does(recipe, monkeypatch, processes, auto_fit, says):
    monkeypatch.setattr(fit, "device", lambda: GPUS["3090"])
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with pytest.raises(UserError) as error, fit.fitted(recipe, "sft", auto_fit, lambda _: None):
        raise MemoryError("CUDA out of memory")
    assert "--sft.gradient_accumulation_steps 8 (now 4)" in str(error.value) and says in str(error.value)
    assert ("by itself" in str(error.value)) == (says.endswith("by itself"))


def test_a_model_of_unknown_shape_is_no_obstacle(recipe, monkeypatch, tmp_path):
    monkeypatch.setattr(fit, "device", lambda: GPUS["3090"])
    (tmp_path / "config.json").write_text('{"model_type": "rwkv"}')
    recipe.model, said = str(tmp_path), []
    with fit.fitted(recipe, "sft", True, said.append):
        said.append("trained")
    assert "cannot be predicted" in said[0] and said[1] == "trained"


def test_gpus_by_name():
    assert device("RTX 3090") is GPUS["3090"] and device("a100-80gb") is GPUS["A100-80"]
    with pytest.raises(UserError, match="H200"):
        device("5090")


# ------------------------------------------------------------------------------------------- against the real thing


@pytest.mark.model
def test_table_agrees_with_a_real_config():
    from core.models import model_source

    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    config = json.loads((Path(model_source(name)) / "config.json").read_text())
    assert Architecture.of_config(config) == ARCHITECTURES[name]


SMALL = {
    "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_parameters_and_adapter_are_counted_right(kind):
    import transformers
    from peft import get_peft_model

    from core.config import Lora
    from core.memory import adapter_size
    from core.models import lora_config

    config = getattr(transformers, f"{kind}Config")(**SMALL, head_dim=32)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    arch = Architecture.of_config(config.to_dict())
    assert arch.parameters == sum(p.numel() for p in model.parameters())
    lora = Lora(r=8, layers=[1, 3])
    model = get_peft_model(model, lora_config(lora, model))
    assert adapter_size(arch, lora) == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("adapter", [True, False], ids=["lora", "full"])
def test_training_peak_is_what_the_allocator_counts(bf16, checkpointing, adapter, monkeypatch):
    """A forward and backward pass as training does it, every allocation counted by torch's profiler.

    With checkpointing the head's tile is made small, so that a block's work is the peak; else it is the tile.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    from core.config import Lora, Sft
    from core.memory import _training
    from core.tree import attend_in_tree, collate, score_labelled_positions_only

    score_labelled_positions_only()
    if checkpointing:
        monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 512)
        monkeypatch.setattr("core.memory.TILE", (4096, 512))
    torch.manual_seed(0)
    config = Qwen2Config(**SMALL)
    model = Qwen2ForCausalLM(config).to(torch.bfloat16 if bf16 else torch.float32)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    attend_in_tree(model)
    if adapter:
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    model.train()
    rows, prompt, written = 4, 64, 32
    shared = torch.randint(0, 4000, (prompt,)).tolist()
    ids = [shared + torch.randint(0, 4000, (written,)).tolist() for _ in range(rows)]
    batch = collate([{"input_ids": i, "labels": [-100] * prompt + i[prompt:]} for i in ids])
    cast = torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext()

    def step():
        with cast:
            loss = model(**batch, fused_lm_head=True).loss
        loss.backward()

    step()  # gradients are there from now on
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = counted = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        counted = max(counted, held)
    section = Sft(lora=Lora(r=8) if adapter else None, config={"activation_checkpointing": checkpointing})
    parts = _training(
        section,
        Architecture.of_config(config.to_dict()),
        Batch(rows, prompt + written, written, 1, 1),
        2 if bf16 else 4,
        Device("cpu", 1, kind="cpu"),
    )
    assert sum(parts.values()) == pytest.approx(counted, rel=0.15)
