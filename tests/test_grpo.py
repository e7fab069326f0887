"""GroupTrainer scores what TRL's trainer scores, with its gradients, from fewer tokens."""

import pytest
import torch

from tests.tiny_model import build_tiny_model


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    from datasets import Dataset
    from trl import GRPOConfig

    from core.grpo import GroupTrainer
    from core.models import load_model, load_tokenizer

    home = tmp_path_factory.mktemp("grpo")
    source = str(build_tiny_model(home / "tiny", home / "raw"))
    sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 16}
    return GroupTrainer(
        model=load_model(source),
        args=GRPOConfig(output_dir=str(home), use_cpu=True, bf16=False, report_to="none", **sizes),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "Two plus two?"}]}] * 8),
        processing_class=load_tokenizer(source),
        reward_funcs=[lambda completions, **_: [float(len(c[0]["content"]) % 3) for c in completions]],
    )


def batch(trainer):
    """Two groups of four: prompts padded on the left, completions on the right."""
    torch.manual_seed(0)
    prompts, prompt_mask = torch.randint(3, 1000, (2, 12)).repeat_interleave(4, 0), torch.ones(8, 12, dtype=torch.long)
    prompt_mask[4:, :5] = 0
    completions, mask = torch.randint(3, 1000, (8, 10)), torch.ones(8, 10, dtype=torch.long)
    for row, n in enumerate([10, 3, 1, 7, 5, 10, 2, 8]):
        mask[row, n:] = 0
    return torch.cat([prompts, completions], 1), torch.cat([prompt_mask, mask], 1), mask


def test_scores_and_gradients_are_trls(trainer):
    ids, attention_mask, mask = batch(trainer)
    results = {}
    for as_tree in (True, False):
        trainer.as_tree = as_tree
        trainer.model.zero_grad()
        logps, entropies, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, attention_mask, 10, compute_entropy=True
        )
        (logps * mask).sum().backward()
        grads = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
        results[as_tree] = logps * mask, entropies * mask, grads
    for ours, theirs in zip(results[True], results[False], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    trainer.as_tree = True
    chunks, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention_mask, 10, batch_size=3)
    torch.testing.assert_close(chunks * mask, results[True][0], rtol=1e-4, atol=1e-5)


def test_a_step_trains(trainer):
    before = [p.clone() for p in trainer.model.parameters()]
    trainer.args.max_steps = 1
    trainer.train()
    assert any((a != b).any() for a, b in zip(before, trainer.model.parameters(), strict=True))
