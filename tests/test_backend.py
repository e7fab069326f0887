"""Which engine writes the rollouts, from what the recipe asks for and what is there; and that TRL takes the fields."""

import pytest

from core.backend import generation_backend
from core.config import load_recipe

GPU = "recipes/spider-qwen2.5-coder-1.5b-24gb.yaml"


def choose(*words, cuda=True, vllm=True, config=GPU):
    return generation_backend(load_recipe(config, words), cuda, vllm)


def test_vllm_where_it_can_run():
    fields, sentence = choose()
    assert fields["use_vllm"] and fields["vllm_mode"] == "colocate" and fields["vllm_enable_sleep_mode"]
    assert "asleep" in sentence
    assert not choose("--grpo.vllm_enable_sleep_mode", "false")[0]["vllm_enable_sleep_mode"]
    assert choose(config="recipes/demo.yaml")[0]["use_vllm"]  # not asked for, but there


@pytest.mark.parametrize("machine", [{"cuda": True, "vllm": False}, {"cuda": False, "vllm": True}])
def test_without_it_the_run_goes_on_and_says_why(machine):
    fields, sentence = choose(**machine)
    assert fields == {"use_vllm": False} and sentence.startswith("transformers")
    assert ("not installed" if machine["cuda"] else "CUDA device") in sentence
    assert "vLLM" not in choose(config="recipes/demo.yaml", **machine)[1]  # nobody asked for it


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_4bit_weights_are_not_handed_to_vllm(mode):
    """TRL sends each parameter as it is stored, packed: vLLM would refuse the shape after minutes of loading."""
    fields, sentence = choose("--grpo.load_in_4bit", "true", "--grpo.vllm_mode", mode)
    assert fields == {"use_vllm": False} and "4-bit" in sentence


def test_what_the_recipe_says_wins():
    assert choose("--grpo.use_vllm", "false")[0] == {"use_vllm": False}
    fields, sentence = choose("--grpo.use_vllm", "false", "--grpo.use_transformers_continuous_batching", "true")
    assert not fields["use_vllm"] and "continuous batching" in sentence


def test_a_server_is_named_and_needs_no_gpu_here():
    fields, sentence = choose("--grpo.vllm_mode", "server", "--grpo.vllm_server_host", "node7", cuda=False)
    assert fields["vllm_mode"] == "server" and "http://node7:8000" in sentence and "trl vllm-serve" in sentence
