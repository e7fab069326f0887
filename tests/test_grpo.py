"""GroupTrainer scores what TRL's trainer scores, with its gradients, from fewer tokens."""

import pytest
import torch

from tests.tiny_model import build_tiny_model

ROW = {"environment": "medical"}


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
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "Two plus two?"}]} | ROW] * 8),
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


def test_an_episode_that_could_not_be_judged_is_left_out(trainer, monkeypatch):
    """Beside a judge that failed once, the shaping reward alone would make its episode look wrong."""
    from trl import GRPOTrainer

    none = float("nan")
    known = [[1.0, 1.0], [none, 1.0], [0.0, 1.0], [1.0, 0.0], [none, 1.0], [none, 0.0], [none, 1.0], [none, 1.0]]
    monkeypatch.setattr(GRPOTrainer, "_calculate_rewards", lambda self, *args: torch.tensor(known))
    found = trainer._calculate_rewards([ROW] * 8)
    assert found[1].isnan().all()
    others = torch.tensor(known)[[0, 2, 3]]
    assert torch.equal(found[[0, 2, 3]], others)
    assert torch.equal(found[4:, 1], torch.tensor(known)[4:, 1])  # a reward that applies to nobody in the group


def test_no_shaping_is_trained_on_while_the_judge_or_the_database_is_away(trainer, monkeypatch):
    from types import SimpleNamespace

    from trl import GRPOTrainer

    from core.config import UserError

    none = float("nan")
    known = [[1.0, 0.1], [0.0, 0.1], [0.0, 0.0], [1.0, 0.1], [none, 0.1], [none, 0.0], [none, 0.1], [none, 0.1]]
    monkeypatch.setattr(GRPOTrainer, "_calculate_rewards", lambda self, *args: torch.tensor(known))
    monkeypatch.setattr(trainer, "reward_func_names", ["medical_judge", "medical_rule"])
    monkeypatch.setattr(trainer, "main_reward", {"medical": "medical_judge"}.get)
    monkeypatch.setattr(trainer, "environments", [SimpleNamespace(trouble="away" if i == 2 else "") for i in range(8)])
    found = trainer._calculate_rewards([ROW] * 8)
    assert found.isnan().all(1).tolist() == [False, False, True, False, True, True, True, True]
    known[:4] = known[4:]
    for _ in range(2):
        assert trainer._calculate_rewards([ROW] * 8).isnan().all()
    with pytest.raises(UserError, match="medical_judge gave no verdict"):
        trainer._calculate_rewards([ROW] * 8)


def test_nothing_to_score(trainer):
    """As with mask_truncated_completions, where every episode of a micro-batch was cut."""
    ids, attention_mask, _ = batch(trainer)
    attention_mask[:, 12:] = 0
    logps, entropies, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, attention_mask, 10, compute_entropy=True
    )
    assert logps.shape == entropies.shape == (8, 10) and not logps.any()


def test_where_grpo_may_start(tmp_path):
    from core.config import UserError
    from step4_grpo import check_start

    run = tmp_path / "run"
    for name, file in (
        ("sft/merged", "config.json"),
        ("grpo/merged", "config.json"),
        ("sft/checkpoint-7", "adapter_config.json"),
    ):
        (run / name).mkdir(parents=True)
        (run / name / file).write_text('{"base_model_name_or_path": "%s"}' % (run / "sft" / "merged"))
    check_start(str(run / "sft" / "merged"), run / "grpo", "--config R")
    with pytest.raises(UserError, match="this step writes to.*--export.stage grpo "):
        check_start(str(run / "grpo" / "merged"), run / "grpo", "--config R")
    with pytest.raises(UserError, match="holds an adapter.*--export.stage sft/checkpoint-7 "):
        check_start(str(run / "sft" / "checkpoint-7"), run / "grpo", "--config R")


@pytest.mark.parametrize("advantages", [[0.5, -0.5, 0, 0, 0, 0, 0.25, 0], [0.0] * 8])
def test_episodes_without_advantage_change_nothing_and_are_left_out(trainer, advantages, monkeypatch):
    ids, attention_mask, mask = batch(trainer)
    inputs = {"prompt_ids": ids[:, :12], "prompt_mask": attention_mask[:, :12], "completion_ids": ids[:, 12:]}
    inputs |= {"completion_mask": mask, "advantages": torch.tensor(advantages), "num_items_in_batch": mask.sum()}
    trainer.current_gradient_accumulation_steps = 1
    rows, score, results = [], trainer._score, {}
    monkeypatch.setattr(trainer, "_score", lambda model, ids, *a: (rows.append(len(ids)), score(model, ids, *a))[1])
    for leaves_out in (True, False):
        monkeypatch.setattr(trainer, "leaves_out", leaves_out)
        trainer.model.train().zero_grad()
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        results[leaves_out] = loss.detach(), torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    assert rows == [max(1, sum(a != 0 for a in advantages)), 8]
    torch.testing.assert_close(results[True], results[False], rtol=1e-4, atol=1e-6)
    assert results[True][1].abs().max() > 0 or not any(advantages)


def test_what_else_is_in_the_loss_keeps_every_episode(trainer):
    from types import SimpleNamespace

    from core.grpo import loss_is_a_sum_over_tokens

    assert trainer.leaves_out and loss_is_a_sum_over_tokens(trainer.args)
    for change in ({"beta": 0.1}, {"entropy_coef": 0.1}, {"top_entropy_quantile": 0.5}, {"loss_type": "grpo"}):
        assert not loss_is_a_sum_over_tokens(SimpleNamespace(**vars(trainer.args) | change))


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [{"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")]
    + [
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"beta": 0.1},
        {"mask_truncated_completions": True},
    ],
    ids=lambda setting: "-".join(f"{k}={v}" for k, v in setting.items()),
)
def test_losses_of_trl_train_an_adapter(tmp_path, trainer, setting):
    """KL too, and without a second model: the reference is the same model with its adapter off."""
    from datasets import Dataset
    from trl import GRPOConfig

    from core.config import Lora
    from core.grpo import GroupTrainer
    from core.models import load_model, lora_config

    source, sizes = trainer.model.name_or_path, {"per_device_train_batch_size": 8, "num_generations": 4}
    model = load_model(source)
    ours = GroupTrainer(
        model=model,
        args=GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", save_strategy="no",
                        max_completion_length=16, max_steps=2, learning_rate=1e-3, logging_steps=1, **sizes | setting),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "Two plus two?"}]} | ROW] * 8),
        processing_class=trainer.processing_class,
        reward_funcs=[lambda completion_ids, **_: [float(ids[0] % 3) for ids in completion_ids]],
        peft_config=lora_config(Lora(r=4, alpha=8), model),
    )  # fmt: skip
    before = {name: p.clone() for name, p in ours.model.named_parameters() if "lora_B" in name}
    ours.train()
    moved = any(bool((p != before[name]).any()) for name, p in ours.model.named_parameters() if name in before)
    assert moved is not setting.get(
        "mask_truncated_completions", False
    )  # 16 tokens end no turn: all of them are masked
    logs = [log for log in ours.state.log_history if "loss" in log]
    assert all(log["loss"] == log["loss"] for log in logs) and ours.ref_model is None
    if "beta" in setting:
        assert logs[0]["kl"] == 0 < logs[1]["kl"]


def test_a_step_trains(trainer):
    before = [p.clone() for p in trainer.model.parameters()]
    trainer.args.max_steps = 1
    trainer.train()
    assert any((a != b).any() for a, b in zip(before, trainer.model.parameters(), strict=True))
