"""Every self-check passes on a sound set-up and fails, saying why, on one that is broken on purpose."""

from types import SimpleNamespace

import pytest

import rewards
from core.config import UserError
from rewards.probe import every_cheat

torch = pytest.importorskip("torch")

from core import checks  # noqa: E402

WEIGHTS = {"exec_match": 1.0, "executes": 0.1, "math_accuracy": 1.0, "math_format": 0.1}


@pytest.fixture(scope="module")
def tokenizer(tiny):
    from core.models import load_tokenizer

    return load_tokenizer(tiny)


@pytest.fixture
def tools():
    from core.chat import schemas_of
    from envs import ENVIRONMENTS

    return {name: schemas_of(make()) for name, make in ENVIRONMENTS.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("{{- turn_end }}\n{%- endmacro", "{%- endmacro", "does not end in the stop token"),
        ("{%- generation %}{{- assistant_turn(message) }}{%- endgeneration %}",
         "{%- generation %}{{- assistant_turn(message) | replace(turn_end, '') }}{%- endgeneration %}{{- turn_end }}",
         "would not learn to stop"),
        ("{%- generation %}{{- assistant_turn(message) }}{%- endgeneration %}",
         "{{- assistant_turn(message)[:6] }}{%- generation %}{{- assistant_turn(message)[6:] }}{%- endgeneration %}",
         "leaves out part of what the model writes"),
        ("{{- ('' if loop.first or loop.previtem.role != 'tool' else '\\n') + '<tool_response>\\n' + message.content "
         "+ '\\n</tool_response>' }}",
         "{%- generation %}{{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}{%- endgeneration %}",
         "covers a tool result"),
        ("message.content or ''", "(message.content or '') | upper", "the parser reads"),
        ("<tool_call>\\n{\"name\"", "<call>\\n{\"name\"", "the parser reads"),
        ("'<tool_response>\\n' + message", "'<tool_response>\\n' + turns | length | string + message", "rendered otherwise"),
        ("{%- if add_generation_prompt %}{{-", "{%- if add_generation_prompt %}{{- 'Go. ' +", "the prompt differs"),
        ("{%- if message.train is defined and message.train is false %}", "{%- if false %}", "wrong turn"),
        ("{{- role_open + message.role + role_close + message.content + turn_end + turn_sep }}",
         "{%- generation %}{{- role_open + message.role + role_close + message.content + turn_end + turn_sep }}"
         "{%- endgeneration %}", "the loss mask covers the prompt"),
    ],
)  # fmt: skip
def test_a_template_that_would_train_another_format(tokenizer, tools, worked_rows, old, new, says):
    row, _ = worked_rows
    wrong = row["messages"][2] | {"train": False}
    row = row | {"messages": row["messages"][:2] + [wrong] + row["messages"][3:4] + row["messages"][2:]}
    checks.check_rendering(tokenizer, row, tools["sql"])
    template = tokenizer.chat_template
    assert old in template
    tokenizer.chat_template = template.replace(old, new)
    try:
        with pytest.raises(UserError, match=says):
            checks.check_rendering(tokenizer, row, tools["sql"])
    finally:
        tokenizer.chat_template = template


@pytest.mark.slow
def test_checks_are_left_out_loudly_and_only_when_asked(tokenizer, tools, worked_rows, monkeypatch, capsys):
    monkeypatch.setattr(tokenizer, "chat_template", tokenizer.chat_template.replace("message.content or ''", "'no'"))
    arguments = tokenizer, worked_rows, tools, rewards, WEIGHTS, every_cheat
    with pytest.raises(UserError, match="the parser reads"):
        checks.before_training(*arguments, skip=False)
    assert capsys.readouterr().out == ""
    checks.before_training(*arguments, skip=True)
    assert "WARNING: --skip_checks" in capsys.readouterr().out


@pytest.mark.slow
def test_rewards_of_gold_and_cheats(worked_rows):
    checks.check_rewards(worked_rows, rewards, WEIGHTS, every_cheat)
    with pytest.raises(UserError, match="cheats earn as much as gold"):  # the weights pay form only
        checks.check_rewards(worked_rows, rewards, {"math_format": 1.0, "executes": 1.0}, every_cheat)
    sql, sums = worked_rows
    with pytest.raises(UserError, match="gold earns math_accuracy 0.00"):
        checks.check_rewards([sql, sums | {"gold": "13"}], rewards, WEIGHTS, every_cheat)


@pytest.mark.slow
def test_a_reward_that_likes_a_cheat_or_cannot_judge(worked_rows):
    def judge(value):  # as `rewards`, but every answer with a tool call is right
        def score(row, completion):
            called = any(m.get("tool_calls") for m in completion)
            return {rewards.PRIMARY[row["environment"]]: value if called else 0.0}

        batch = lambda rows, completions, only: list(map(score, rows, completions))  # noqa: E731
        return SimpleNamespace(score_batch=batch, right_reward=rewards.right_reward, holds=rewards.holds)

    with pytest.raises(UserError, match="an honest failure"):
        checks.check_rewards(worked_rows, judge(1.0), WEIGHTS, every_cheat)
    with pytest.raises(UserError, match="cannot judge gold"):
        checks.check_rewards(worked_rows, judge(None), WEIGHTS, every_cheat)


def test_gold_rows_leave_out_shown_mistakes(worked_rows):
    row = worked_rows[0]
    corrected = row | {"messages": [*row["messages"][:2], row["messages"][2] | {"train": False}]}
    assert checks.gold_rows([corrected, row, row, row, worked_rows[1]], 2) == [row, row, worked_rows[1]]


def logps(adapter: float, noise: float = 0.0):
    """Log-probabilities of 400 tokens: without adapter, with one of this effect, and a third engine's noise."""
    torch.manual_seed(0)
    off, effect, error = -torch.rand(400) * 3, torch.randn(400) * adapter, torch.randn(400) * noise
    return off, off + effect, error


@pytest.mark.parametrize(("dtype", "adapter", "noise"), [("float32", 1e-3, 1e-6), ("bfloat16", 0.1, 0.03)])
def test_sampler_of_the_base_model_is_found(dtype, adapter, noise):
    off, on, error = logps(adapter, noise)
    assert checks.compare_sampler(on + error, on, off, dtype, 1)["follows"] == pytest.approx(1, abs=0.1)
    with pytest.raises(UserError, match="rollouts come from the base"):
        checks.compare_sampler(off + error, on, off, dtype, 1)


def test_what_cannot_be_told_yet_is_no_failure():
    off, on, error = logps(0.01, 0.02)  # bf16: the difference of on and off is rounding, the sampler's noise is larger
    assert checks.compare_sampler(off + error, on, off, "bfloat16", 1)["follows"] is None
    assert checks.compare_sampler(off, off, off, "float32", 0) == {"gap": 0.0, "follows": None}  # before the first step
    assert checks.compare_sampler(on, on, None, "float32", 9)["follows"] is None  # all weights train


def test_sampler_at_another_temperature_and_without_some_scores():
    off, on, _ = logps(0.001)
    with pytest.raises(UserError, match="differ from the trainer's"):
        checks.compare_sampler(on * 0.9, on, off, "bfloat16", 0)
    holes = on.clone()
    holes[::2] = float("nan")
    assert checks.compare_sampler(holes, on, off, "float32", 0)["gap"] == 0
    with pytest.raises(UserError):
        checks.compare_sampler(on * float("nan"), on, off, "float32", 0)


@pytest.fixture(scope="module")
def grpo(tiny, tmp_path_factory):
    """A real GRPO trainer whose adapter has learnt something, with our sampler."""
    from datasets import Dataset
    from trl import GRPOConfig

    from core.config import Lora
    from core.decode import fast_generate
    from core.grpo import GroupTrainer
    from core.models import load_model, load_tokenizer, lora_config

    tokenizer, home = load_tokenizer(tiny), str(tmp_path_factory.mktemp("grpo"))
    sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 12, "temperature": 0.7}
    model = load_model(tiny)
    trainer = GroupTrainer(
        model=model,
        args=GRPOConfig(output_dir=home, use_cpu=True, bf16=False, report_to="none", **sizes),
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": f"{i} + 2?"}], "environment": "medical"} for i in range(8)]
        ),
        processing_class=tokenizer,
        reward_funcs=[lambda completions, **_: [float(len(c[0]["content"]) % 3) for c in completions]],
        peft_config=lora_config(Lora(r=4, alpha=8), model),
    )
    torch.manual_seed(1)
    for name, p in trainer.model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(std=0.2)
    trainer.model.generate = fast_generate(trainer.model, [tokenizer.eos_token_id], tokenizer.pad_token_id)
    return trainer


def generate(trainer):
    said = []
    trainer.observers = (checks.SamplerCheck(said.append),)
    trainer.model.train()
    trainer._generate_and_score_completions([trainer.train_dataset[i // 4] for i in range(8)])
    return said


@pytest.mark.slow
def test_rollouts_follow_the_adapter_or_the_run_ends(grpo):
    said = generate(grpo)
    assert "sampler and trainer agree" in said[0] and "100% of the adapter's effect" in said[1]
    sound = grpo.model.generate

    def base_model(*args, **kwargs):
        with grpo.model.disable_adapter():
            ids = sound(*args, **kwargs)
        base_model.logprobs = sound.logprobs
        return ids

    grpo.model.generate = base_model
    try:
        with pytest.raises(UserError, match="differ from the trainer's"):
            generate(grpo)
        for name, p in grpo.model.named_parameters():
            if "lora_B" in name:
                p.data *= 0.002  # so young that the gap alone is within the limit
        with pytest.raises(UserError, match="rollouts come from the base"):
            generate(grpo)
    finally:
        grpo.model.generate = sound


@pytest.mark.slow
def test_the_sampler_is_looked_at_as_soon_as_something_trained_was_written(grpo, monkeypatch):
    check = checks.SamplerCheck()
    check(grpo, [], {"completion_mask": torch.zeros(8, 12), "sampling_per_token_logps": torch.zeros(8, 12)})
    assert check.next is None
    monkeypatch.setattr(grpo.args, "bf16", True)  # weights in float32, autocast in bfloat16
    assert "limit 0.1 in bfloat16" in generate(grpo)[0]


@pytest.mark.slow
def test_an_adapter_that_changes_nothing(grpo):
    def step(check, lr):
        optimizer = SimpleNamespace(param_groups=[{"lr": lr}])
        for p in grpo.model.parameters():
            p.grad = torch.ones_like(p) if p.requires_grad else None
        check.on_pre_optimizer_step(None, None, None, model=grpo.model, optimizer=optimizer)
        check.on_step_end(None, SimpleNamespace(global_step=1), None, model=grpo.model)
        return check.done

    assert step(checks.AdapterCheck([5, 6, 7, 8]), 1e-3)
    broken = checks.AdapterCheck([5, 6, 7, 8])
    grpo.model.disable_adapter_layers()
    for p in grpo.model.parameters():
        p.requires_grad_(True)  # gradients flow, the optimizer steps, and still the adapter is not part of the model
    try:
        assert not step(broken, 0.0)  # warm-up starts at 0: nothing can be told
        with pytest.raises(UserError, match="not part of the model"):
            step(broken, 1e-3)
    finally:
        grpo.model.enable_adapter_layers()


@pytest.mark.slow
@pytest.mark.parametrize("setting", [{"max_length": 30, "padding_free": False}, {}])
def test_labels_that_do_not_reach_the_model(tiny, tmp_path, worked_rows, tokenizer, tools, setting):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from core.models import load_model
    from core.sft import labelled

    rows = [labelled(tokenizer, row, tools[row["environment"]]) for row in worked_rows]
    trainer = SFTTrainer(
        model=load_model(tiny),
        args=SFTConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **({"max_length": None} | setting)
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    if setting:  # rows are cut in the middle
        with pytest.raises(UserError, match="puts the loss on 0 tokens"):
            checks.check_labels(trainer, rows)
    else:
        checks.check_labels(trainer, rows)
