"""What is on disk is whole or absent."""

import pytest

from core.artifacts import atomic_dir, atomic_file, read_jsonl, write_jsonl
from core.config import UserError


def test_interrupted_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [{"a": "ü"}])

    def rows():
        yield {"a": 1}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_jsonl(path, rows())
    assert read_jsonl(path) == [{"a": "ü"}] and [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]


def test_interrupted_folder_leaves_the_old_one(tmp_path):
    target = tmp_path / "model"
    with atomic_dir(target) as tmp:
        (tmp / "weights").write_text("old")
    with pytest.raises(OSError), atomic_dir(target) as tmp:
        (tmp / "weights").write_text("new")
        raise OSError(28, "No space left on device")
    assert (target / "weights").read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["model"]


def test_missing_and_damaged_files_name_the_command(tmp_path):
    with pytest.raises(UserError, match="python step2"):
        read_jsonl(tmp_path / "rows.jsonl", "python step2")
    with atomic_file(tmp_path / "rows.jsonl") as f:
        f.write('{"a": 1}\n{"a"')
    with pytest.raises(UserError, match="rows.jsonl:2 is not JSON"):
        read_jsonl(tmp_path / "rows.jsonl", "python step2")
