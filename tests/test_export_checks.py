"""What stops an export before it works, and what it says of weights that are not this run's."""

import json
import shutil
from types import SimpleNamespace

import pytest

from core.adapter import vllm_line
from core.artifacts import read_manifest, write_jsonl
from core.config import UserError, load_recipe
from core.export import export, how_to_use
from core.export_checks import freed_bytes, merged_bytes
from tests.test_export import logits, make_run, refused, train
from tests.test_gguf import build, edit


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("made"), "smollm2")


@pytest.fixture
def recipe(made, tmp_path):
    """A copy of the run that a test may spoil."""
    shutil.copytree(made.checkpoint_root, tmp_path / "ck")
    shutil.copytree(made.model, tmp_path / "base")
    folders = ["--checkpoint_root", str(tmp_path / "ck"), "--data_root", str(tmp_path / "data")]
    return load_recipe("recipes/ci.yaml", ["--model", made.model, *folders])


def test_the_licence_stands_beside_every_format(recipe, tmp_path):
    base = tmp_path / "base"
    (base / "LICENSE").write_text("the licence's own words")
    (base / "README.md").write_text("---\nlicense: other\nlicense_name: special\n---\n# A base\n")
    train(recipe := recipe_on(recipe, base), "sft", base, 1)
    paths = export(recipe, "sft", ["hf", "adapter"], tmp_path / "out")
    for folder in paths.values():
        assert (folder / "LICENSE").read_text() == "the licence's own words"
        assert "license_name: special" in (folder / "README.md").read_text()


def recipe_on(recipe, base):
    return load_recipe(
        "recipes/ci.yaml",
        ["--model", str(base), "--checkpoint_root", recipe.checkpoint_root, "--data_root", recipe.data_root],
    )


def test_the_adapter_s_folder_can_be_served(recipe, tmp_path):
    from transformers import AutoTokenizer

    path = export(recipe, "sft", ["hf", "adapter"], tmp_path / "out")["adapter"]
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert "<tool_call>" in tokenizer.chat_template and "generation %}" not in tokenizer.chat_template
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(path.parent / "hf").chat_template
    assert "library_name: peft" in (path / "README.md").read_text()
    assert vllm_line(path, "me/base", "ci").startswith("not this adapter, which has rows of embeddings")  # SFT's
    train(recipe, "grpo", recipe.model, 9)  # without rows, rank 11
    path = export(recipe, "grpo", ["adapter"], tmp_path / "grpo")["adapter"]
    line = vllm_line(path, "me/base", "ci")
    assert line.startswith(
        f"vllm serve me/base --enable-lora --max-lora-rank 16 --lora-modules ci={path} --chat-template"
    )
    assert line in "\n".join(
        how_to_use(SimpleNamespace(**vars(recipe) | {"model": "me/base"}), "", {"adapter": path}, "")
    )


def test_a_run_that_has_been_moved(made, recipe, tmp_path, monkeypatch):
    """Its adapters name folders that are gone; base and weights are found all the same."""
    import torch

    gone = str(tmp_path / "gone" / "ci" / "sft" / "merged")
    for part in ("adapter", "checkpoint-4"):
        edit(recipe.run_dir / "grpo" / part / "adapter_config.json", base_model_name_or_path=gone)
    edit(recipe.run_dir / "grpo" / "manifest.json", base=gone)
    from tests.test_export import load

    meant = logits(load(made.run_dir / "grpo" / "merged"), [5, 6, 7])
    paths = export(recipe, "grpo/checkpoint-4", ["hf", "adapter"], tmp_path / "out")
    assert torch.allclose(logits(load(paths["hf"]), [5, 6, 7]), meant, atol=1e-5)
    from peft import PeftModel

    both = PeftModel.from_pretrained(load(recipe.model), str(paths["adapter"]))
    assert torch.allclose(logits(both, [5, 6, 7]), meant, atol=1e-4)
    card = (paths["hf"] / "README.md").read_text()
    assert "- sft: 4 steps" in card and "- grpo/checkpoint-4: 4 steps" in card


def test_weights_of_another_run(made, recipe, tmp_path):
    other = load_recipe(
        "recipes/ci.yaml", ["--model", made.model, "--checkpoint_root", str(tmp_path / "ck"), "--run", "b"]
    )
    (tmp_path / "ck" / "b" / "eval").mkdir(parents=True)
    (tmp_path / "ck" / "b" / "eval" / "report.md").write_text("the results of b")
    said, source = [], str(recipe.run_dir / "sft" / "merged")
    card = (export(other, source, ["hf"], tmp_path / "out", said.append)["hf"] / "README.md").read_text()
    assert any(f"{source} is of run 'ci', and is exported under the name of run 'b'" in line for line in said)
    assert (
        "Not evaluated." in card and "the results of b" not in card and "- sft: 4 steps" in card and "run: ci" in card
    )

    other.model = str(tmp_path / "base")
    refused(other, source, ["hf"], r"was trained on .*base \(run 'ci'\), and model: in this recipe is .*base")
    build(tmp_path / "qwen", "qwen3")
    for file in ("config.json", "model.safetensors"):
        shutil.copy(tmp_path / "qwen" / file, recipe.run_dir / "sft" / "merged" / file)
    refused(recipe, "sft", ["hf"], "Qwen3ForCausalLM.*another model's files")


def test_what_a_format_cannot_take_is_said_before_the_work(recipe, tmp_path):
    write_jsonl(recipe.data_dir / "eval.jsonl", [{"prompt": [{"role": "system", "content": 'Say """ twice.'}]}])
    refused(recipe, "sft", ["ollama"], "system prompt contains")
    refused(recipe, "grpo", ["gguf-lora"], "sft/adapter has rows of embeddings")
    edit(recipe.run_dir / "grpo" / "adapter" / "adapter_config.json", use_dora=True)
    refused(recipe, "grpo", ["hf", "adapter"], "uses use_dora")
    tokenizer = recipe.run_dir / "sft" / "merged" / "tokenizer.json"
    edit(tokenizer, pre_tokenizer={"type": "Whitespace"})
    refused(recipe, "sft", ["gguf-q8_0"], "no tokenizer that cuts text")
    edit(recipe.run_dir / "sft" / "merged" / "config.json", model_type="unheard-of")
    refused(recipe, "sft", ["gguf-q8_0"], "sft/merged")


def test_a_model_type_that_transformers_does_not_know(tmp_path):
    from core.gguf import plan

    build(tmp_path / "odd", "qwen3")
    edit(tmp_path / "odd" / "config.json", model_type="unheard-of")
    with pytest.raises(UserError, match="config.json is not one that loads here.*unheard-of"):
        plan(tmp_path / "odd", "f16")


def test_an_output_that_is_a_file(recipe, tmp_path):
    (tmp_path / "thesis.txt").write_text("not ours")
    for folder in (tmp_path / "thesis.txt", tmp_path / "thesis.txt" / "out"):
        with pytest.raises(UserError, match="thesis.txt is a file. Pass another --output"):
            export(recipe, "sft", ["hf"], folder)
    assert (tmp_path / "thesis.txt").read_text() == "not ours"


def test_an_export_killed_on_a_tight_disk_goes_on(recipe, tmp_path, monkeypatch):
    """Leftovers go before the disk is asked, and files that will be replaced count as room."""
    out, free = tmp_path / "out", 1000
    export(recipe, "sft", ["gguf-f16"], out)
    left = out / "gguf" / ".ci-f16.gguf.123.tmp"
    left.write_bytes(b"x" * 10)
    seen = []

    def usage(path):
        seen.append(left.exists())
        return SimpleNamespace(free=free)

    monkeypatch.setattr("shutil.disk_usage", usage)
    edit(recipe.run_dir / "sft" / "merged" / "generation_config.json", temperature=0.9)
    recipe.eval.temperature = 0.5  # other settings: the old files make room for the new ones
    (out / "verify.md").write_text("of the old files")
    paths = export(recipe, "sft", ["gguf-f16"], out)
    assert seen == [False] and paths["gguf-f16"].exists() and not (out / "verify.md").exists()
    (out / "verify.md").write_text("of these files")
    export(recipe, "sft", ["gguf-f16"], out)
    assert (out / "verify.md").exists()  # nothing has changed
    with pytest.raises(UserError, match="are free there: make room"):
        export(recipe, "sft", ["gguf-f16", "gguf-f32"], out)

    fresh = tmp_path / "fresh"  # killed within the first write of all
    fresh.mkdir()
    (fresh / ".manifest.json.123.tmp").write_text("{")
    export(recipe, "sft", ["hf"], fresh)
    assert sorted(p.name for p in fresh.iterdir()) == ["hf", "manifest.json"]


def test_room_that_a_removal_gives(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"x" * 100)
    two.hardlink_to(one)
    assert freed_bytes([one]) == 0 and freed_bytes([one, two]) == 100


def test_merged_weights_take_the_room_of_the_type_they_are_saved_in(recipe, monkeypatch, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(recipe.model, dtype=torch.bfloat16).save_pretrained(half)
    size = (half / "model.safetensors").stat().st_size
    for kind, times in ((torch.float32, 2), (torch.bfloat16, 1)):
        monkeypatch.setattr("core.export_checks.compute_dtype", lambda kind=kind: kind)
        assert merged_bytes(half) == pytest.approx(times * size, rel=0.1)


def test_the_line_for_llama_cpp_has_room_for_the_longest_conversation(recipe, tmp_path):
    paths = {"gguf-q8_0": tmp_path / "m.gguf"}
    (line,) = how_to_use(recipe, "", paths, "")
    assert line.endswith("core.llama_server " + str(paths["gguf-q8_0"]))
    recipe.data.max_length, recipe.agent.max_completion_length = 6000, 2000
    (line,) = how_to_use(recipe, "", paths, "")
    assert line.endswith("--num_ctx 8000")


def test_an_older_export_s_card_follows_a_new_evaluation_in_both_folders(recipe, tmp_path):
    out = tmp_path / "out"
    export(recipe, "base", ["hf"], out)
    assert "- not trained here" in (out / "hf" / "README.md").read_text()
    assert json.loads((out / "hf" / "manifest.json").read_text())["training"] == {}
    assert "files" in read_manifest(out)["artifacts"]["hf"]
