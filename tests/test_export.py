"""Step 6 on a tiny run with real adapters: every format computes what the stage computes, and bad input stops it first."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest

from core.artifacts import write_manifest
from core.card import licence_of, model_card
from core.config import UserError, load_recipe
from core.export import export
from core.hub import check_hub
from tests.test_gguf import Engine, build, edit, greedy

TEXT = "SELECT name FROM customer WHERE id = 12"


def train(recipe, stage: str, base, seed: int) -> None:
    """What a step leaves: adapter, merged weights, one checkpoint, manifest. The adapter's weights are random, not learnt."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from core.models import load_tokenizer

    folder, rank = recipe.run_dir / stage, 2 + seed
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=3 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    if stage == "sft":
        config.trainable_token_indices = {"embed_tokens": [7, 5]}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "trainable_tokens_delta" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    tokenizer = load_tokenizer(str(base))
    for target in (folder / "adapter", folder / "checkpoint-4"):
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    (folder / "checkpoint-4" / "trainer_state.json").write_text("{}")
    model.merge_and_unload().save_pretrained(folder / "merged")
    tokenizer.save_pretrained(folder / "merged")
    write_manifest(folder, recipe, [], 0.0, base=str(base), steps=4)


def make_run(home, family: str):
    build(home / "base", family, max_position_embeddings=1024)
    edit(home / "base" / "generation_config.json", repetition_penalty=1.1, do_sample=True, temperature=0.7)
    folders = ["--model", str(home / "base"), "--checkpoint_root", str(home / "ck"), "--data_root", str(home / "data")]
    recipe = load_recipe("recipes/ci.yaml", folders)
    train(recipe, "sft", home / "base", 1)
    train(recipe, "grpo", recipe.run_dir / "sft" / "merged", 2)
    return recipe


@pytest.fixture(scope="module", params=["smollm2", "qwen2.5"])  # tied embeddings and RoPE in halves; untied and biases
def recipe(request, tmp_path_factory):
    return make_run(tmp_path_factory.mktemp(request.param), request.param)


def logits(model, ids: list[int]):
    import torch

    with torch.no_grad():
        return model.eval()(torch.tensor([ids])).logits[0]


def load(folder, **kwargs):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **kwargs)


def test_every_format_computes_what_the_stage_computes(recipe, tmp_path):
    import torch
    from peft import PeftModel
    from transformers import AutoTokenizer

    out = tmp_path / "out"
    paths = export(recipe, "grpo", ["hf", "gguf-f32", "ollama", "adapter"], out)
    tokenizer = AutoTokenizer.from_pretrained(paths["hf"])
    ids = tokenizer(TEXT).input_ids
    meant = logits(load(recipe.run_dir / "grpo" / "merged"), ids)
    assert torch.equal(logits(load(paths["hf"]), ids), meant)
    assert torch.equal(logits(load(out / "gguf", gguf_file=paths["gguf-f32"].name), ids), meant)
    both = logits(PeftModel.from_pretrained(load(recipe.model), str(paths["adapter"])), ids)
    assert not torch.allclose(logits(load(recipe.model), ids), meant, atol=0.1)
    assert torch.allclose(both, meant, atol=1e-4)
    assert json.loads((paths["adapter"] / "adapter_config.json").read_text())["base_model_name_or_path"] == recipe.model

    assert "generation %}" not in tokenizer.chat_template and "<tool_call>" in tokenizer.chat_template
    in_gguf = AutoTokenizer.from_pretrained(out / "gguf", gguf_file=paths["gguf-f32"].name).chat_template
    assert in_gguf == tokenizer.chat_template
    generation = json.loads((paths["hf"] / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.eos_token_id and generation["do_sample"] is False
    assert "repetition_penalty" not in generation
    assert (paths["ollama"] / "Modelfile").read_text().startswith("FROM ./ci-f32.gguf")


def test_a_checkpoint_is_merged_into_its_own_base(recipe, tmp_path):
    import torch

    ids = [5, 6, 7, 8, 9]
    meant = logits(load(recipe.run_dir / "grpo" / "merged"), ids)
    paths = export(recipe, "grpo/checkpoint-4", ["hf"], tmp_path / "out")
    assert torch.allclose(logits(load(paths["hf"]), ids), meant, atol=1e-5)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["hf", "manifest.json"]


def test_finished_files_are_kept_damaged_and_outdated_ones_made_again(recipe, tmp_path):
    out, said = tmp_path / "out", []
    paths = export(recipe, "sft", ["gguf-f16", "gguf-q8_0"], out)
    artifacts = json.loads((out / "manifest.json").read_text())["artifacts"]
    assert list(artifacts) == ["hf", "gguf-f16", "gguf-q8_0"]
    assert len(artifacts["gguf-f16"]["files"]["gguf/ci-f16.gguf"]["sha256"]) == 64
    whole, when = paths["gguf-q8_0"].read_bytes(), paths["gguf-f16"].stat().st_mtime_ns
    paths["gguf-q8_0"].write_bytes(whole[:-1] + b"\0")
    (out / "gguf" / ".ci-f16.gguf.123.tmp").write_bytes(b"a crash left this")
    export(recipe, "sft", ["gguf-f16", "gguf-q8_0"], out, said.append)
    assert paths["gguf-q8_0"].read_bytes() == whole and paths["gguf-f16"].stat().st_mtime_ns == when
    assert "gguf-q8_0 of" in said[0] and "damaged" in said[0] and "finished already" in said[1] + said[2]
    assert len(list((out / "gguf").iterdir())) == 2

    export(recipe, "grpo", ["gguf-f16"], out, said.append)  # other weights: nothing of the old ones stays beside them
    assert paths["gguf-f16"].stat().st_mtime_ns != when and not paths["gguf-q8_0"].exists()
    assert list(json.loads((out / "manifest.json").read_text())["artifacts"]) == ["hf", "gguf-f16"]


def test_best_is_the_best_of_the_weights_that_are_there(recipe, tmp_path):
    from core.export import chosen_stage
    from core.models import fingerprint, stage_source

    def measured(**accuracies):
        weights = {s: fingerprint(stage_source(recipe, s)) for s in accuracies}
        summary = {"stages": {s: {"accuracy": a} for s, a in accuracies.items()}, "weights": weights}
        folder = recipe.run_dir / "eval"
        folder.mkdir(exist_ok=True)
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "report.md").write_text(f"measured: {accuracies}")

    said = []
    measured(sft=0.5, grpo=0.25)
    assert chosen_stage(recipe, "best", said.append) == "sft"
    measured(sft=None, grpo=None)
    with pytest.raises(UserError, match="no accuracy"):
        chosen_stage(recipe, "best", said.append)
    measured(sft=0.5, grpo=0.75)
    assert chosen_stage(recipe, "best", said.append) == "grpo"
    card = export(recipe, "grpo", ["hf"], tmp_path / "out")["hf"] / "README.md"
    assert "'grpo': 0.75" in card.read_text()
    measured(sft=0.5, grpo=0.8)  # evaluated again: the card says so, the weights stay
    export(recipe, "grpo", ["hf"], tmp_path / "out", said.append)
    assert "'grpo': 0.8" in card.read_text() and "finished already" in said[-1]
    export(recipe, "grpo", ["hf"], tmp_path / "out", said.append)
    assert "finished already" in said[-1]  # whole, by its own checksums
    weights = next((recipe.run_dir / "grpo" / "merged").glob("*.safetensors"))
    os.utime(weights, (1, 1))  # trained anew
    with pytest.raises(UserError, match="measured other weights of grpo than there are now. Run step5_eval.py again"):
        chosen_stage(recipe, "best", said.append)
    fresh = export(recipe, "grpo", ["hf"], tmp_path / "fresh")["hf"] / "README.md"
    assert "Not evaluated." in fresh.read_text()
    (recipe.run_dir / "eval" / "summary.json").write_text(
        '{"stages": {"grpo": {"accuracy": 0.5}}}'
    )  # of an older version
    assert "Not evaluated." in (export(recipe, "grpo", ["hf"], tmp_path / "old")["hf"] / "README.md").read_text()
    shutil.rmtree(recipe.run_dir / "eval")


def test_ollama_is_of_the_quantisation_asked_for(recipe, tmp_path):
    said = []
    for kind in ("gguf-q8_0", "gguf-f16"):
        folder = export(recipe, "sft", [kind, "ollama"], tmp_path / "out", said.append)["ollama"]
        (line,) = [x for x in (folder / "Modelfile").read_text().splitlines() if x.startswith("FROM")]
        assert kind.removeprefix("gguf-") in line


@pytest.mark.slow
def test_gguf_adapter_on_the_base_in_llama_cpp(tmp_path):
    """The base's GGUF with the adapter's GGUF says, greedily, what base and adapter say in transformers."""
    recipe = make_run(tmp_path, "smollm2")
    with pytest.raises(UserError, match="rows of embeddings"):  # SFT trained two
        export(recipe, "grpo", ["gguf-lora"], tmp_path / "both")
    stage = str(tmp_path / "alone")
    train(recipe, "grpo", tmp_path / "base", 3)
    (recipe.run_dir / "grpo" / "adapter").rename(stage)
    paths = export(recipe, stage, ["gguf-lora", "gguf-f32"], tmp_path / "lora")
    base = export(recipe, "base", ["gguf-f32"], tmp_path / "plain")
    merged = load(paths["hf"])
    ids = list(range(20, 40))
    meant = greedy(merged, ids, 24)
    assert greedy(load(recipe.model), ids, 24) != meant
    assert Engine(paths["gguf-f32"]).greedy(ids, 24) == meant
    assert Engine(base["gguf-f32"], lora=paths["gguf-lora"]).greedy(ids, 24) == meant


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.fixture
def broken(recipe, tmp_path):
    """A copy of the run that a test may spoil."""
    import shutil

    shutil.copytree(recipe.checkpoint_root, tmp_path / "ck")
    return load_recipe("recipes/ci.yaml", ["--model", recipe.model, "--checkpoint_root", str(tmp_path / "ck")])


def refused(recipe, stage, formats, says, folder=None):
    folder = folder or recipe.run_dir / "export"
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError, match=says):
        export(recipe, stage, formats, folder)
    assert sorted(folder.rglob("*")) == before


def test_an_adapter_of_another_base(broken, tmp_path):
    point = broken.run_dir / "sft" / "checkpoint-4"
    build(tmp_path / "wider", "qwen3", hidden_size=96)
    edit(point / "adapter_config.json", base_model_name_or_path=str(tmp_path / "wider"))
    refused(broken, "sft/checkpoint-4", ["hf"], "was trained on .*wider, and model: in this recipe is")
    broken.model = str(tmp_path / "wider")
    refused(
        broken, "sft/checkpoint-4", ["hf"], r"does not fit .*wider: .* is \[\d, 64\], .* of the base is \[\d+, 96\]"
    )


def test_an_unfinished_stage_or_checkpoint(broken):
    point = broken.run_dir / "grpo" / "checkpoint-4"
    weights = point / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-9])
    refused(broken, str(point), ["hf"], "is not whole")
    weights.unlink()
    refused(broken, str(point), ["hf"], "adapter_model.safetensors is missing")
    weights.write_bytes(whole)
    (point / "trainer_state.json").unlink()
    refused(broken, str(point), ["hf"], "unfinished: the run died")
    (broken.run_dir / "grpo" / "manifest.json").unlink()
    refused(broken, "grpo", ["hf"], "is not finished")
    (broken.run_dir / "sft" / "merged" / "model.safetensors").unlink()
    refused(broken, "sft", ["hf"], "model.safetensors is missing")


def test_a_model_that_a_format_does_not_allow(broken, tmp_path):
    for folder, changes in (("odd", {"intermediate_size": 72}), ("other", {})):
        build(tmp_path / folder, "qwen3", **changes)
    refused(broken, str(tmp_path / "odd"), ["gguf-q8_0"], "rows that are a multiple of 32")
    edit(tmp_path / "other" / "config.json", architectures=["MambaForCausalLM"])
    refused(broken, str(tmp_path / "other"), ["gguf-f16"], "MambaForCausalLM cannot become a GGUF")
    refused(broken, "base", ["adapter"], "has no adapter")


def test_a_folder_of_another_run_or_of_nobody_knows_what(broken, tmp_path):
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "thesis.txt").write_text("not ours")
    refused(broken, "sft", ["hf"], "holds thesis.txt, not written by this step", folder)
    (folder / "thesis.txt").unlink()
    export(broken, "sft", ["hf"], folder)
    broken.run = "elsewhere"
    refused(
        broken, str(tmp_path / "ck" / "ci" / "sft" / "merged"), ["hf"], "another run .run ci, now elsewhere", folder
    )


def test_a_disk_that_is_too_small(broken, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    refused(broken, "sft", ["gguf-f16"], "needs 0.0 GB in .*, and 0.0 GB are free")


def test_a_push_that_cannot_work(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="is no repository name"):
        check_hub("not a name")
    with pytest.raises(UserError, match="no hub is reachable"):
        check_hub("me/model")
    monkeypatch.setattr("core.hub.hub_reachable", lambda: True)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UserError, match="hf auth login"):
        check_hub("me/model")


def test_the_card_knows_the_licence_of_every_recipe_s_base(recipe, tmp_path):
    from pathlib import Path

    import yaml

    for file in Path("recipes").glob("*.yaml"):
        model = yaml.safe_load(file.read_text())["model"]
        assert not licence_of(model, tmp_path).startswith("see "), model
    assert licence_of("Qwen/Qwen2.5-Coder-3B-Instruct", tmp_path) == "qwen-research"
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# A base\n")
    assert licence_of("me/mine", tmp_path) == "mit"
    card = model_card(recipe, "grpo", recipe.run_dir / "grpo" / "merged", tmp_path)
    assert yaml.safe_load(card.split("---\n")[1])["license"] == "mit"
    assert "- grpo: 4 steps in" in card and "run: ci" in card
