"""What the steps leave on disk: atomic files and folders, JSON lines, and the manifest that says a stage is whole."""

import contextlib
import hashlib
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from core.config import Recipe, UserError

PACKAGES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate", "datasets", "vllm", "gguf")


@contextlib.contextmanager
def atomic_file(path: str | Path, mode: str = "w"):
    """An open file that becomes `path` only if the block ends well."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(tmp, mode, encoding=None if "b" in mode else "utf-8") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_dir(path: str | Path):
    """A temporary folder that takes the place of `path` only if the block ends well."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir()
    try:
        yield tmp
        if path.exists():
            shutil.rmtree(path)
        os.replace(tmp, path)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def write_jsonl(path: str | Path, rows: Iterable[dict]) -> None:
    with atomic_file(path) as f:
        for row in rows:
            f.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_jsonl(path: str | Path, make_it: str = "") -> list[dict]:
    """Rows of a JSON-lines file; `make_it` is the command that writes it, for the error."""
    path = Path(path)
    if not path.exists():
        near = sorted(p.name for p in path.parent.glob("*")) if path.parent.exists() else []
        raise UserError(f"{path} is missing (its folder holds: {', '.join(near) or 'nothing'}). Run: {make_it}")
    rows = []
    with open(path, encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise UserError(f"{path}:{number} is not JSON ({error.msg}). Make the file again: {make_it}") from error
    return rows


def file_hash(path: str | Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()[:16]


def write_manifest(folder: str | Path, recipe: Recipe, inputs: Iterable[str | Path], started: float, **facts) -> None:
    """Written last: its presence means that the stage is whole. Says what it was made of and with what."""
    manifest = {
        "recipe": recipe.to_dict(),
        "inputs": {str(p): file_hash(p) for p in inputs},
        "seed": recipe.seed,
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "versions": _versions(),
        "device": device_name(),
        "seconds": round(time.time() - started, 1),
        **facts,
    }
    with atomic_file(Path(folder) / "manifest.json") as f:
        json.dump(manifest, f, indent=1, ensure_ascii=False)


def read_manifest(folder: str | Path) -> dict | None:
    path = Path(folder) / "manifest.json"
    return read_json(path) if path.exists() else None


def read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{path} is not JSON ({error}): it was cut or changed by hand; make its folder again"
        ) from error


def device_name() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"cpu ({os.cpu_count()} cores, {platform.machine()})"


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=10, cwd=Path(__file__).parent)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
