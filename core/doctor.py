"""What this machine has, as a table: each finding that matters says why, and each problem says how to mend it.

    python -m core.doctor                                  # always exits with 0
    python -m core.doctor --config recipes/demo.yaml       # exits with 1 if this recipe cannot run here

Reads nothing but the recipe, writes nothing. Run by step1_env.sh when it is done.
"""

import argparse
import concurrent.futures
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from core.config import Recipe, UserError, load_recipe, run_step
from core.models import EMBEDDED, hub_reachable, in_hub_cache

GIB = 2**30


@dataclass
class Finding:
    """One line of the table. `fix` is set where something is amiss: `kind` 'problem' needs it, 'note' may."""

    what: str
    found: str
    kind: str = "ok"  # ok, note, problem
    fix: str = ""


@dataclass
class Torch:
    """What torch and bitsandbytes say about themselves."""

    version: str
    built_for: str  # CUDA version, "" for the CPU build
    cuda: bool = False
    mps: bool = False
    gpu: str = ""
    gpus: int = 0
    gpu_gib: float = 0.0
    gpu_free_gib: float = 0.0
    capability: tuple[int, int] = (0, 0)
    four_bit: str = "not tried"  # "" where it works, else the error


@dataclass
class Machine:
    """What the checks of a recipe need to know."""

    cuda: bool
    gpu_gib: float
    four_bit: str  # "" where it works, else the error
    hub: bool
    disk_gib: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", metavar="R", help="also say whether this recipe can run here")
    args = parser.parse_args()
    recipe = load_recipe(args.config) if args.config else None

    # asked while torch is looked at; a thread, because no time limit reaches a name server that does not answer
    pool = concurrent.futures.ThreadPoolExecutor(1)
    hub = pool.submit(hub_reachable)
    findings, machine = look(hub)
    show(findings)
    obstacles = impossible(recipe, machine) if recipe else []
    for text in obstacles:
        print(f"{args.config} cannot run here: {text}", file=sys.stderr)
    if recipe and not obstacles:
        print(f"{args.config} can run here")
    sys.stdout.flush()
    sys.stderr.flush()
    pool.shutdown(wait=False)
    os._exit(1 if obstacles else 0)  # not sys.exit: it would wait for a name look-up that hangs


def look(hub: concurrent.futures.Future) -> tuple[list[Finding], Machine]:
    torch = _probe_torch()
    driver = _nvidia_smi()
    disk_gib = shutil.disk_usage(Path.cwd()).free / GIB
    vllm = _version("vllm")
    reachable = _hub(hub)
    findings = [
        Finding("Python", f"{platform.python_version()} ({platform.system()} {platform.machine()})"),
        _torch(torch, driver),
        *_gpu(torch),
        _memory(),
        _four_bit(torch),
        _vllm(vllm, torch.cuda),
        _flash_attention(),
        _hub_finding(reachable),
        _embedded_finding(),
        _disk(disk_gib),
    ]
    return findings, Machine(torch.cuda, torch.gpu_gib, torch.four_bit, reachable, disk_gib)


def impossible(recipe: Recipe, machine: Machine) -> list[str]:
    """Why the recipe cannot run on this machine, each with what to do instead; empty if it can."""
    reasons = []
    name = recipe.model
    if not (Path(name).is_dir() or in_hub_cache(name) or machine.hub or _embedded(name)):
        reasons.append(
            f"model {name} is neither a local folder nor in the hub's cache, and no hub is reachable. "
            "Pass a folder (--model DIR) or set HF_ENDPOINT to a mirror"
        )
    for section in ("sft", "grpo"):
        if getattr(recipe, section).load_in_4bit and machine.four_bit:
            reasons.append(
                f"{section}.load_in_4bit, but 4-bit fails here ({machine.four_bit}). --{section}.load_in_4bit false"
            )
    if recipe.grpo.config.get("use_vllm") and not machine.cuda:
        reasons.append(
            "grpo.use_vllm needs a GPU that torch can use. Try recipes/demo.yaml, or --grpo.use_vllm false (slow)"
        )
    meant_for = re.search(r"-(\d+)gb$", recipe.run)
    if machine.cuda and meant_for and machine.gpu_gib < 0.85 * int(meant_for[1]):
        reasons.append(
            f"it is set for a GPU of {meant_for[1]} GB and this one has {machine.gpu_gib:.0f} GiB. Take a recipe for a smaller "
            "one (ls recipes), or lower the batch sizes and grpo.vllm_gpu_memory_utilization under another run name"
        )
    if machine.disk_gib < 1:
        reasons.append(f"{machine.disk_gib:.1f} GiB of disk free; checkpoints need more. Free some")
    return reasons


def show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    marks = {"ok": ("ok", "green"), "note": ("note", "yellow"), "problem": ("fix", "bold red")}
    table = Table(title="What was found", title_justify="left", show_edge=False, pad_edge=False)
    for column in ("", "What", "Found"):
        table.add_column(column, no_wrap=column != "Found")
    for finding in findings:
        mark, colour = marks[finding.kind]
        found = Text(finding.found)
        if finding.fix:
            found.append(f"\n-> {finding.fix}", style=colour)
        table.add_row(Text(mark, style=colour), finding.what, found)
    Console().print(table)


# ------------------------------------------------------------------------------------------------ torch, in a process


def _probe_torch() -> Torch:
    """In a process of its own, which a native library may crash without taking the table with it."""
    command = [sys.executable, "-c", "from core.doctor import probe; probe()"]
    here = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired as error:
        raise UserError(
            "torch gave no answer within two minutes: look at `nvidia-smi`, or run ./step1_env.sh again"
        ) from error
    why = (
        f"crashed with signal {-done.returncode}"
        if done.returncode < 0
        else (done.stderr.strip().splitlines() or [""])[-1][:120]
    )
    lines = done.stdout.splitlines()
    if not lines:
        raise UserError(f"torch cannot be imported ({why}). Install it again: rm -r .venv && ./step1_env.sh")
    four_bit = "" if done.returncode == 0 else why
    return Torch(**json.loads(lines[0]), four_bit=four_bit)


def probe() -> None:
    """Prints the facts about torch as JSON, then quantises a tensor to nf4 and back: no exception means that it works."""
    import torch

    cuda = torch.cuda.is_available()
    facts = {"version": torch.__version__, "built_for": torch.version.cuda or "", "cuda": cuda}
    facts["mps"] = torch.backends.mps.is_available()
    if cuda:
        free, total = torch.cuda.mem_get_info()
        facts |= {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
        facts |= {"gpu_gib": total / GIB, "gpu_free_gib": free / GIB, "capability": torch.cuda.get_device_capability()}
    print(json.dumps(facts), flush=True)

    import bitsandbytes.functional as bnb

    weights = torch.randn(64, 256).to("cuda" if cuda else "cpu")
    packed, state = bnb.quantize_4bit(weights, quant_type="nf4")
    error = (bnb.dequantize_4bit(packed, state) - weights).abs().mean().item()
    if not 0.02 < error < 0.12:  # 0.073 on normally distributed weights; 0 would mean that nothing was quantised
        raise ValueError(f"nf4 gives wrong values: mean error {error:.3f}, expected about 0.07")


# ------------------------------------------------------------------------------------------------------ the findings


def _torch(torch: Torch, driver: str) -> Finding:
    build = f"CUDA {torch.built_for}" if torch.built_for else "CPU build"
    device = "cuda" if torch.cuda else "cpu (Apple's GPU is not used)" if torch.mps else "cpu"
    found = f"{torch.version} ({build}), device {device}, {os.cpu_count()} cores"
    if driver and not torch.built_for:
        return Finding(
            "torch", found, "problem", f"there is a GPU ({driver}) and torch cannot use it: ./step1_env.sh --gpu"
        )
    if driver and not torch.cuda:
        fix = f"the GPU's driver ({driver}) does not run CUDA {torch.built_for}; CUDA 13 needs driver 580 or newer"
        return Finding("torch", found, "problem", fix)
    return Finding("torch", found)


def _gpu(torch: Torch) -> list[Finding]:
    if not torch.cuda:
        return [Finding("GPU", "none", "note", "enough for recipes/demo.yaml; the others are meant for one NVIDIA GPU")]
    found = f"{torch.gpu}, {torch.gpu_gib:.0f} GiB, {torch.gpu_free_gib:.0f} GiB free"
    if torch.gpus > 1:
        found += f" (the first of {torch.gpus}: CUDA_VISIBLE_DEVICES chooses one, accelerate launch takes all)"
    busy = torch.gpu_free_gib < 0.85 * torch.gpu_gib
    memory = Finding(
        "GPU", found, "note" if busy else "ok", "another program holds some of it: nvidia-smi" if busy else ""
    )
    number = ".".join(map(str, torch.capability))
    if tuple(torch.capability) >= (8, 0):
        return [memory, Finding("Compute capability", f"{number}: bfloat16")]
    fix = "bfloat16 is only emulated: much slower than on Ampere (RTX 30, A10, A100) or newer"
    return [memory, Finding("Compute capability", number, "problem", fix)]


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    limit = Path("/sys/fs/cgroup/memory.max")  # a container's own limit
    text = limit.read_text().strip() if limit.exists() else "max"
    if text.isdigit():
        total = min(total, int(text) / GIB)
    if total < 7:
        return Finding(
            "Memory", f"{total:.0f} GiB", "problem", "the demo needs about 8 GB; close other programs or add swap"
        )
    return Finding("Memory", f"{total:.0f} GiB")


def _four_bit(torch: Torch) -> Finding:
    if torch.four_bit:
        fix = "load_in_4bit is not possible (recipes without it are fine): ./step1_env.sh again, or look at python -m bitsandbytes"
        return Finding(
            "4-bit (bitsandbytes)", f"{_version('bitsandbytes') or 'absent'}: {torch.four_bit}", "problem", fix
        )
    device = "GPU" if torch.cuda else "CPU"
    return Finding("4-bit (bitsandbytes)", f"{_version('bitsandbytes')}: nf4 there and back on the {device}")


def _vllm(installed: str, cuda: bool) -> Finding:
    if installed:
        return Finding("vLLM", f"{installed}: fast rollouts in GRPO (grpo.use_vllm)")
    if cuda:
        fix = "rollouts run through transformers, several times slower: ./step1_env.sh --gpu"
        return Finding("vLLM", "absent", "problem", fix)
    return Finding("vLLM", "absent: of use on a GPU only; rollouts run through transformers")


def _flash_attention() -> Finding:
    installed = _version("flash-attn")
    if installed:
        return Finding("flash-attn", f"{installed} (used only where a recipe asks for it)")
    return Finding("flash-attn", "absent and not needed: attention runs through torch's SDPA")


def _hub(hub: concurrent.futures.Future) -> bool:
    try:
        return hub.result(timeout=4)
    except concurrent.futures.TimeoutError:
        return False


def _hub_finding(reachable: bool) -> Finding:
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if reachable:
        return Finding("Model hub", f"{endpoint} reachable")
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0", "false", "False"):
        return Finding("Model hub", "off (HF_HUB_OFFLINE): local folders, the cache and the embedded model only")
    fix = "only local folders (--model DIR), the hub's cache and the embedded model; a mirror: export HF_ENDPOINT=https://..."
    return Finding("Model hub", f"{endpoint} not reachable", "note", fix)


def _embedded_finding() -> Finding:
    missing = [name for name in EMBEDDED if not _embedded(name)]
    if missing:
        return Finding("Embedded model", "absent", "problem", "the demo and the tests need it: ./step1_env.sh")
    return Finding("Embedded model", ", ".join(EMBEDDED))


def _disk(free_gib: float) -> Finding:
    found = f"{free_gib:.0f} GiB free in this folder"
    if free_gib < 10:
        return Finding(
            "Disk", found, "problem", "a 1.5B run keeps about 10 GB, a 3B run 20 GB (the demo: 2 GB); free some"
        )
    return Finding("Disk", found)


# ------------------------------------------------------------------------------------------------------------ helpers


def _version(package: str) -> str:
    """The installed version, '' if absent. Not an import: vLLM's takes ten seconds."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _embedded(name: str) -> bool:
    if name not in EMBEDDED:
        return False
    package, file = EMBEDDED[name]
    spec = importlib.util.find_spec(package)
    return spec is not None and (Path(spec.submodule_search_locations[0]) / file).is_file()


def _nvidia_smi() -> str:
    """'driver 580.65' where a driver answers, else ''."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f"driver {done.stdout.split()[0]}" if done.returncode == 0 and done.stdout.strip() else ""


if __name__ == "__main__":
    run_step(main)
