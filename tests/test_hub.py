"""--push_to_hub with a hub that is played: where it goes, and that it goes nowhere public."""

from types import SimpleNamespace

import pytest

from core.config import UserError
from core.hub import check_hub, push


class Hub:
    """What HfApi is asked; `there`: repository -> whether it is private."""

    there: dict = {}
    uploads: list = []

    def whoami(self):
        return {"name": "me"}

    def repo_info(self, repo):
        from huggingface_hub.errors import RepositoryNotFoundError

        if repo not in self.there:
            raise RepositoryNotFoundError("404", response=SimpleNamespace(headers={}, request=None, status_code=404))
        return SimpleNamespace(private=self.there[repo])

    def create_repo(self, repo, private, exist_ok):
        name = repo if "/" in repo else f"me/{repo}"
        self.there.setdefault(name, private)
        return SimpleNamespace(repo_id=name, __str__=lambda: name)

    def upload_file(self, path_or_fileobj, path_in_repo, repo_id):
        self.uploads.append((repo_id, path_in_repo))

    def upload_folder(self, folder_path, path_in_repo, repo_id):
        self.uploads.append((repo_id, path_in_repo))


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "token")
    monkeypatch.setattr("core.hub.hub_reachable", lambda: True)
    monkeypatch.setattr(Hub, "there", {"me/public": False, "me/private": True})
    monkeypatch.setattr(Hub, "uploads", [])
    return Hub


def test_files_go_to_the_owner_s_private_repository(hub, tmp_path):
    file, folder, said = tmp_path / "m.gguf", tmp_path / "hf", []
    file.write_bytes(b"GGUF")
    folder.mkdir()
    check_hub("model")
    assert "me/model" not in hub.there  # asked only
    push("model", {"hf": folder, "gguf-f16": file, "adapter": folder, "ollama": folder}, said.append)
    assert hub.uploads == [("me/model", ""), ("me/model", "m.gguf"), ("me/model", "adapter")]
    assert hub.there["me/model"] is True and said[0].endswith("(private)")


@pytest.mark.parametrize("name", ["public", "me/public"])
def test_nothing_goes_to_a_public_repository(hub, name, tmp_path):
    for act in (check_hub, lambda repo: push(repo, {"hf": tmp_path})):
        with pytest.raises(
            UserError, match="me/public is there already and public.*hf repos settings me/public --private"
        ):
            act(name)
    assert hub.uploads == []
    check_hub("private")
