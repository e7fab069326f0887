"""Resampling on TRL's real trainer and a tiny model: what is trained on, what is logged, what is drawn."""

import itertools

import pytest

pytestmark = pytest.mark.slow  # builds a model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    from tests.tiny_model import build_tiny_model

    home = tmp_path_factory.mktemp("resample")
    return str(build_tiny_model(home / "tiny", home / "raw"))


@pytest.fixture
def make_trainer(tiny, math_row, tmp_path):
    """A trainer on `flat` prompts, whose episodes all earn 1, and `mixed` ones, whose episodes earn 0, 1, 0, ..."""
    from datasets import Dataset
    from trl import GRPOConfig

    from core.grpo import GroupTrainer
    from core.models import load_model, load_tokenizer
    from envs import ENVIRONMENTS

    def reward(completions, id, **columns):
        return [1.0 if name.startswith("flat") else float(i % 2) for i, name in enumerate(id)]

    def shaping(completions, id, **columns):
        return [float("shaped" in name and i % 2) for i, name in enumerate(id)]

    def undecided(completions, **columns):
        return [None] * len(completions)

    def make(names, resample, **settings):
        system, _ = math_row["prompt"]
        rows = [math_row | {"id": n, "prompt": [system, {"role": "user", "content": n * (i + 1)}]}
                for i, n in enumerate(names)]  # fmt: skip
        config = {
            "output_dir": str(tmp_path), "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2,
            "num_generations": 4, "max_completion_length": 12, "max_tool_calling_iterations": 1, "max_steps": 1,
            "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "shuffle_dataset": False,
            "activation_checkpointing": False, "save_strategy": "no", "temperature": 1.0, "beta": 0.0,
            "loss_type": "dapo", "reward_weights": [0.1, 1.0, 2.0],
        }  # fmt: skip
        trainer = GroupTrainer(
            model=load_model(tiny, False),
            args=GRPOConfig(**config | settings),
            train_dataset=Dataset.from_list(rows),
            processing_class=load_tokenizer(tiny),
            reward_funcs=[shaping, reward, undecided],
            environment_factory={"calculator": ENVIRONMENTS["calculator"]},
        )
        trainer.resample = resample
        trainer.model.train()
        return trainer

    return make


def generate(trainer):
    inputs = [row for row in itertools.islice(trainer.train_dataset, 4) for _ in range(4)]
    return trainer._generate_and_score_completions(inputs), inputs


def texts(trainer, batch):
    ids, mask = batch["prompt_ids"], batch["prompt_mask"].bool()
    prompts = trainer.processing_class.batch_decode([i[m] for i, m in zip(ids, mask, strict=True)])
    return [prompt.split("user\n")[-1].split("<|im_end|>")[0] for prompt in prompts]


def test_flat_groups_give_way_to_groups_with_spread(make_trainer):
    import torch

    trainer = make_trainer(["mixed-0", "flat-1", "flat-shaped-2", "mixed-3", "flat-4", "mixed-5", "mixed-6"], 4)
    batch, _ = generate(trainer)
    advantages = batch["advantages"].view(4, 4)
    assert (advantages.abs().max(1).values > 0.1).all() and torch.allclose(advantages.sum(1), torch.zeros(4), atol=1e-4)
    found = texts(trainer, batch)
    assert found[::4][0] == "mixed-0" and found[::4][3] == "mixed-3" * 4
    assert {found[4], found[8]} == {"mixed-5" * 6, "mixed-6" * 7}
    assert all(len(set(found[i : i + 4])) == 1 for i in range(0, 16, 4))
    mask = batch["completion_mask"] * batch["tool_mask"]
    assert batch["num_items_in_batch"] == mask.sum() and len({len(v) for v in batch.values() if v.ndim}) == 1
    padding = batch["completion_ids"][batch["completion_mask"] == 0]
    assert (padding == trainer.processing_class.pad_token_id).all()


def test_every_episode_of_an_extra_group_has_a_row_of_its_own(make_trainer, monkeypatch):
    trainer, rows = make_trainer(["flat-1", "flat-2", "flat-3", "flat-4", "mixed-5", "mixed-6"], 1), []
    apart = trainer._generate_apart
    monkeypatch.setattr(trainer, "_generate_apart", lambda inputs: (rows.extend(inputs), apart(inputs))[1])
    generate(trainer)
    assert len({id(row) for row in rows}) == len(rows) == 8  # TRL writes what a rollout_func returns into them


def test_a_row_moves_with_all_it_has(make_trainer):
    """Log-probabilities that TRL computed before the move are those of the sequences after it, padding and all."""
    import torch

    trainer = make_trainer(
        ["flat-0", "mixed-1", "flat-2", "flat-3", "mixed-4", "mixed-5", "mixed-6"], 3, num_iterations=2
    )
    batch, _ = generate(trainer)
    assert trainer._metrics["train"]["resample/replaced"] == [0.75]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    with torch.no_grad():
        again, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, batch["completion_ids"].shape[1], batch_size=4
        )
    written = batch["completion_mask"].bool()
    assert torch.allclose(again[written], batch["old_per_token_logps"][written], atol=1e-4)


def test_the_log_counts_the_first_round_once(make_trainer):
    trainer = make_trainer(["flat-0", "flat-1", "mixed-2", "flat-3", "flat-4", "mixed-5"], 2)
    generate(trainer)
    metrics = trainer._metrics["train"]
    assert all(len(values) == 1 for values in metrics.values())
    assert metrics["frac_reward_zero_std"] == [0.75] and metrics["reward"] == [pytest.approx(0.875)]
    assert metrics["resample/replaced"] == [0.25] and metrics["resample/useful"] == [0.5]
    assert metrics["resample/extra_tokens"][0] > 0
    assert metrics["num_tokens"][0] == trainer.state.num_input_tokens_seen > 0
    assert len(trainer._logs["prompt"]) == 16


def test_a_budget_of_rounds_and_the_same_draw_again(make_trainer):
    trainer = make_trainer([f"flat-{i}" for i in range(40)], 3)
    calls, original = [], trainer._generate
    trainer._generate = lambda prompts: calls.append([p[-1]["content"] for p in prompts]) or original(prompts)
    batch, _ = generate(trainer)
    assert [len(prompts) for prompts in calls] == [16, 16, 16, 16]  # the batch, and three rounds of four groups
    assert len({name for prompts in calls for name in prompts}) == 16  # no prompt twice
    assert not batch["advantages"].any() and trainer._metrics["train"]["resample/useful"] == [0.0]
    first, calls[:] = list(calls), []
    trainer._step = 7  # counts from 0 again in a resumed run
    generate(trainer)
    assert calls == first


def test_prompts_run_out(make_trainer):
    trainer = make_trainer(["flat-0", "mixed-1", "flat-2", "flat-3", "mixed-4"], 5)
    generate(trainer)
    assert trainer._metrics["train"]["resample/replaced"] == [0.25]


def test_training_with_it(make_trainer):
    trainer = make_trainer(["flat-0", "flat-1", "flat-2", "flat-3", "mixed-4", "mixed-5", "mixed-6"], 1)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    assert any((p.detach() != before[n]).any() for n, p in trainer.model.named_parameters())  # flat ones teach nothing
    assert trainer.state.log_history[0]["resample/useful"] == 0.75


def test_settings_that_cannot_be(make_trainer):
    from core.config import UserError
    from core.resample import check_settings

    args = make_trainer(["flat-0", "flat-1", "flat-2", "flat-3"], 0).args
    check_settings(args)
    for name, value in (("scale_rewards", "batch"), ("multi_objective_aggregation", "normalize_then_sum")):
        kept = getattr(args, name)
        setattr(args, name, value)
        with pytest.raises(UserError, match="--grpo.resample 0"):
            check_settings(args)
        setattr(args, name, kept)
    args.num_generations = 3
    with pytest.raises(UserError, match="whole groups"):
        check_settings(args)
