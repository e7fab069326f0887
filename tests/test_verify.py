"""--verify: passes an export that speaks as its stage, fails one that does not, and never passes what it could not ask."""

import shutil

import pytest

from core.config import UserError, load_recipe

pytestmark = pytest.mark.slow


@pytest.fixture
def verify(speaking, tmp_path, monkeypatch):
    pytest.importorskip("xllamacpp")
    import rewards
    from core import verify
    from core.rollout import Episode
    from envs import CalculatorEnv
    from tests.speaking_model import rows

    monkeypatch.setenv("PATH", "")  # no Ollama
    recipe = load_recipe("recipes/ci.yaml", ["--agent.max_completion_length", "256"])

    def run(**files):
        def episode(row, tokenizer):
            return Episode(row, CalculatorEnv(), tokenizer, recipe.agent)

        files = {name.replace("_", "-"): path for name, path in files.items()}
        return verify.verify(recipe, str(speaking / "hf"), files, rows(), episode, rewards, tmp_path)

    return run


def test_what_speaks_as_the_stage_passes(verify, speaking, tmp_path, capsys):
    stage, hf, gguf = verify(hf=speaking / "hf", gguf_f16=speaking / "f16.gguf")
    assert [f.engine for f in (stage, hf, gguf)] == ["transformers", "transformers", "llama.cpp"]
    assert stage.prompts == hf.prompts == gguf.prompts and None not in gguf.prompts
    assert all(r["correct"] and r["tokens"] > 10 for f in (stage, hf, gguf) for r in f.records)
    assert gguf.size == (speaking / "f16.gguf").stat().st_size and gguf.load_seconds > 0
    lines = (tmp_path / "verify.md").read_text().splitlines()
    assert lines[0] == f"**{speaking / 'hf'}, 4 questions**"
    assert "| 4 of 4 | 4 of 4 | 4 of 4 |" in lines[-1] and lines[-1].endswith("passed |")
    assert len((tmp_path / "verify.jsonl").read_text().splitlines()) == 12


def test_other_weights_fail_and_show_where(verify, tmp_path):
    from core.chat import template_for
    from core.gguf import convert
    from tests.tiny_model import build_tiny_model

    other = build_tiny_model(tmp_path / "other", tmp_path / "raw")
    (other / "chat_template.jinja").write_text(template_for("chatml", training=False))
    with pytest.raises(UserError) as error:
        verify(gguf_f16=convert(other, tmp_path / "other.gguf", "f16"))
    said = str(error.value)
    assert "accuracy is 0.0%, the stage's 100.0%" in said and "first episode that differs: Ann has 12 apples" in said
    assert "assistant calls calculator {'expression': '12 + 30'}" in said
    assert "FAILED" in (tmp_path / "verify.md").read_text()


@pytest.mark.parametrize("kind", ["hf", "gguf-f16"])
def test_another_template_fails(verify, speaking, tmp_path, kind):
    """One space too many at the end of the system message: most answers stay right, the prompt is not the trained one."""
    from core.gguf import convert

    folder = shutil.copytree(speaking / "hf", tmp_path / "hf")
    template = folder / "chat_template.jinja"
    template.write_text(
        template.read_text().replace("{{- turn_end + turn_sep }}", "{{- ' ' + turn_end + turn_sep }}", 1)
    )
    path = folder if kind == "hf" else convert(folder, tmp_path / "t.gguf", "f16")
    with pytest.raises(UserError, match="4 of 4 prompts reach it with other ids"):
        verify(**{kind: path})


def test_a_server_that_shows_only_counts(verify, speaking, tmp_path, monkeypatch):
    """As Ollama: the number of prompt tokens is compared."""
    from core import verify as module

    monkeypatch.setattr(module, "server_ids", lambda *words: None)
    stage, gguf = verify(gguf_f16=speaking / "f16.gguf")
    assert gguf.prompts == [len(ids) for ids in stage.prompts]
    monkeypatch.setattr(module, "_count", lambda *words: 7)
    with pytest.raises(UserError, match="4 of 4 prompts reach it with other counts of tokens"):
        verify(gguf_f16=speaking / "f16.gguf")


def test_what_has_no_engine_here_is_not_passed(verify, speaking, tmp_path, capsys, monkeypatch):
    from core import llama_server

    monkeypatch.setattr(llama_server, "installed", lambda: False)
    verify(gguf_f16=speaking / "f16.gguf", ollama=speaking)
    out = capsys.readouterr().out
    assert "not verified: gguf-f16. pip install" in out and "not verified: ollama" in out
    assert (tmp_path / "verify.md").read_text().count("not verified") == 2 and "passed" not in out
