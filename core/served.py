"""Does a server read the prompt that the model was trained on?"""

import os

from core.config import UserError
from core.endpoint import check_url


def compare_prompt(url: str, model: str, messages: list[dict], tools: list[dict], ids: list[int]) -> str:
    """One line for the user: by ids where the server shows them, else by the count of prompt tokens."""
    found = server_ids(url, model, messages, tools)
    if found:
        return _verdict(found, ids)
    with _client() as client:
        chat = _chat(model, messages, tools) | {"max_tokens": 1}
        usage = _ask(client, f"{url.rstrip('/')}/chat/completions", chat).get("usage")
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if type(count) is not int:
        return "prompts: the server shows neither ids nor counts of its prompts, so they are not compared with training"
    if count == len(ids):
        return f"prompts: the server counts {count} tokens, as training does (it does not show the ids)"
    return f"warning: the server makes {count} tokens of a prompt that has {len(ids)} in training: its chat template is another"


def server_ids(url: str, model: str, messages: list[dict], tools: list[dict]) -> list[int] | None:
    """The ids that the server makes of a prompt: from /tokenize (vLLM) or /apply-template (llama-server), else None."""
    check_url(url)
    root, chat = url.rstrip("/").removesuffix("/v1"), _chat(model, messages, tools)
    with _client() as client:
        found = _ask(client, f"{root}/tokenize", chat | {"add_generation_prompt": True}).get("tokens")
        if not found and (text := _ask(client, f"{root}/apply-template", chat).get("prompt")):
            text = {"content": text, "add_special": True, "parse_special": True}
            found = _ask(client, f"{root}/tokenize", text).get("tokens")
    return found if found and isinstance(found, list) else None


def _chat(model: str, messages: list[dict], tools: list[dict]) -> dict:
    return {"model": model, "messages": messages} | ({"tools": tools} if tools else {})


def _client():
    import httpx

    return httpx.Client(headers={"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}"}, timeout=60)


def _ask(client, address: str, body: dict) -> dict:
    import httpx

    try:
        reply = client.post(address, json=body)
        found = reply.json() if reply.status_code == 200 else {}
        return found if isinstance(found, dict) else {}
    except httpx.ConnectError as error:
        raise UserError(f"no server answers at {address} ({error}). Start it, or correct --endpoint") from error
    except (httpx.HTTPError, ValueError, RecursionError):  # the last two: no JSON, or nested without end
        return {}


def _verdict(found: list[int], ids: list[int]) -> str:
    if found == ids:
        return f"prompts: the server's ids are those of training ({len(ids)} compared)"
    at = next((n for n, (a, b) in enumerate(zip(found, ids, strict=False)) if a != b), min(len(found), len(ids)))
    return (
        f"warning: the server's prompt differs from training at token {at} ({found[at : at + 3]} instead of "
        f"{ids[at : at + 3]}): its chat template or tokenizer is another, and the figures are those of that prompt"
    )
