"""Many processes, one run (accelerate launch, recipes/accelerate/): who touches the disk, who speaks, who waits.

With one process nothing here does anything. Every process computes; the first one alone decides, writes and reports.
"""

import functools
import os
import shlex
import sys
from datetime import timedelta

from core.config import UserError

PATIENCE = timedelta(minutes=30)  # how long a process waits for another one, e.g. while the first one merges


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def sharded() -> bool:
    """Whether weights are divided among the processes (FSDP, ZeRO-3)."""
    zero = (
        os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
        and os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3"
    )
    return zero or os.environ.get("ACCELERATE_USE_FSDP") == "true"


def check_sharded(load_in_4bit: bool, generates: bool = False, use_vllm: bool = False, accuracy_rows: int = 0) -> None:
    """Said before a model is loaded: what one process cannot do with several GPUs, nor several with divided weights."""
    check_launched()
    if sharded() and load_in_4bit:
        raise UserError(
            "4-bit weights are not divided among processes: load_in_4bit false, or recipes/accelerate/ddp.yaml"
        )
    if sharded() and generates and not use_vllm:
        raise UserError(
            "rollouts without vLLM would gather the divided weights for every token: --grpo.use_vllm true, or "
            "recipes/accelerate/ddp.yaml"
        )
    if sharded() and accuracy_rows:
        stage = "grpo" if generates else "sft"
        raise UserError(
            f"{stage}.accuracy_rows is {accuracy_rows}: it plays episodes without vLLM, for which divided weights would be "
            f"gathered at every token. Add --{stage}.accuracy_rows 0, or use recipes/accelerate/ddp.yaml"
        )


def check_launched() -> None:
    """Several GPUs and one process: the Trainer would copy the model to each of them, which TRL refuses once it is loaded."""
    import torch

    if (gpus := torch.cuda.device_count()) < 2 or int(os.environ.get("LOCAL_RANK", "-1")) != -1:
        return
    command, first = shlex.join(sys.argv), os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    raise UserError(
        f"{gpus} GPUs are visible to one process, which can train on one only. Run\n"
        f"  CUDA_VISIBLE_DEVICES={first} python {command}\n"
        "or, with one process a GPU (docs/scaling.md: divide gradient_accumulation_steps by their number),\n"
        f"  accelerate launch --config_file recipes/accelerate/ddp.yaml --num_processes {gpus} {command}"
    )


def one_log() -> None:
    """Only the first process prints; what goes wrong in the others still reaches stderr."""
    if not is_main():
        sys.stdout = open(os.devnull, "w")


def on_main(function):
    """The function runs in the first process; the others wait, and get its result, or end quietly with its error."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if world() == 1:
            return function(*args, **kwargs)
        from accelerate.utils import broadcast_object_list

        _connect()
        outcome, error = [None, False], None
        if is_main():
            try:
                outcome = [function(*args, **kwargs), False]
            except BaseException as raised:
                outcome, error = [None, True], raised
        result, failed = broadcast_object_list(outcome)
        if error is not None:
            raise error
        if failed:
            sys.exit(1)  # the first process says why
        return result

    return call


def _connect() -> None:
    """Join the other processes, as the trainer would later; it takes over what it finds."""
    import torch
    from accelerate import PartialState

    if not torch.distributed.is_initialized():
        PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)


class Lockstep:
    """Mixin for GRPOTrainer: where processes generate jointly, all do so as often as the one with the most turns.

    An episode's later turns are generated in a loop of its own process. Asking vLLM's server is a joint act (the first
    process asks for all, and gives each an equal slice), and so is reading sharded weights: a process with fewer turns
    would leave the others waiting for ever, or take answers that are not its own. Here each round's prompts are divided
    anew among all processes, until none has any left.
    """

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, **kwargs):
        if not self._jointly():
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations, **kwargs)
        from accelerate.utils import gather_object

        counts = gather_object([len(prompt_ids)])
        if len(set(counts)) == 1 and counts[0]:
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations, **kwargs)
        if not any(counts):
            return None
        prompts, here = gather_object(prompt_ids), self.accelerator.process_index
        share = -(-len(prompts) // len(counts))
        mine = prompts[here * share : (here + 1) * share]
        filler = [[self._tokenizer.eos_token_id]] * (share - len(mine))  # a slice must be full, if with nothing
        ids, logprobs = super()._generate_single_turn(mine + filler, None, {}, 1)
        answers = gather_object(list(zip(ids, logprobs or [None] * share, strict=True)))
        answers = answers[sum(counts[:here]) :][: len(prompt_ids)]
        return [a[0] for a in answers], None if logprobs is None else [a[1] for a in answers]

    def _tool_call_loop(self, *args):
        out = super()._tool_call_loop(*args)
        self.see_the_others_through()
        return out

    def see_the_others_through(self) -> None:
        """Called where a process has no more turns of its own to generate."""
        while self._jointly() and self._generate_single_turn([], None, {}, 1) is not None:
            pass

    def _jointly(self) -> bool:
        shared_engine = self.use_vllm and (self.vllm_mode == "server" or self.args.vllm_tensor_parallel_size > 1)
        sharded = self._dist.is_zero3 or self._dist.is_fsdp
        return self.accelerator.num_processes > 1 and (shared_engine or sharded)
