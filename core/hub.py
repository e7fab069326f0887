"""Uploading an export, behind an explicit flag."""

from pathlib import Path

from core.config import UserError
from core.models import hub_reachable


def check_hub(repo: str) -> None:
    """Whether a push can work, asked before hours of work rather than after."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import RepositoryNotFoundError
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"--push_to_hub '{repo}' is no repository name such as user/model: {error}") from error
    if not hub_reachable():
        raise UserError("--push_to_hub: no hub is reachable (HF_HUB_OFFLINE, HF_ENDPOINT or the network)")
    if not get_token():
        raise UserError("--push_to_hub: you are not logged in. Run: hf auth login")
    api = HfApi()
    if "/" not in repo:  # the hub gives it to whoever is logged in
        repo = f"{api.whoami()['name']}/{repo}"
    try:
        _refuse_public(api, repo)
    except RepositoryNotFoundError:  # it will be made, and private
        pass


def push(repo: str, paths: dict[str, Path], say=print) -> None:
    """The model at the top of a private repository, the other formats beside it. Not run here: there is no hub to try it on."""
    from huggingface_hub import HfApi

    api = HfApi()
    url = api.create_repo(repo, private=True, exist_ok=True)
    repo = url.repo_id  # with its owner
    _refuse_public(api, repo)
    for name, path in paths.items():
        if path.is_file():
            api.upload_file(path_or_fileobj=path, path_in_repo=path.name, repo_id=repo)
        elif name != "ollama":  # its GGUF is there already
            api.upload_folder(folder_path=path, path_in_repo="" if name == "hf" else name, repo_id=repo)
    say(f"pushed {', '.join(paths)} to {url} (private)")


def _refuse_public(api, repo: str) -> None:
    if not api.repo_info(repo).private:
        raise UserError(
            f"--push_to_hub: {repo} is there already and public, and nothing is published from here. "
            f"Make it private (hf repos settings {repo} --private), or choose another name"
        )
