"""Does a server read the prompt that the model was trained on? Compared by ids where the server shows them, else by count."""

import os


def compare_prompt(url: str, model: str, messages: list[dict], tools: list[dict], ids: list[int]) -> str:
    """One line for the user. Asks /tokenize (vLLM), /apply-template (llama-server), else the count of prompt tokens."""
    import httpx

    root = url.rstrip("/").removesuffix("/v1")
    key = os.environ.get("OPENAI_API_KEY", "none")
    with httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=60) as client:

        def ask(path: str, body: dict) -> dict:
            try:
                reply = client.post(path, json=body)
                return reply.json() if reply.status_code == 200 else {}
            except (httpx.HTTPError, ValueError):
                return {}

        chat = {"model": model, "messages": messages} | ({"tools": tools} if tools else {})
        found = ask(f"{root}/tokenize", chat | {"add_generation_prompt": True}).get("tokens")
        if not found and (text := ask(f"{root}/apply-template", chat).get("prompt")):
            found = ask(f"{root}/tokenize", {"content": text, "add_special": True, "parse_special": True}).get("tokens")
        if found:
            return _verdict(found, ids)
        usage = ask(f"{url.rstrip('/')}/chat/completions", chat | {"max_tokens": 1}).get("usage") or {}
    count = usage.get("prompt_tokens")
    if count is None:
        return "prompts: the server shows neither ids nor counts of its prompts, so they are not compared with training"
    if count == len(ids):
        return f"prompts: the server counts {count} tokens, as training does (it does not show the ids)"
    return f"warning: the server makes {count} tokens of a prompt that has {len(ids)} in training: its chat template is another"


def _verdict(found: list[int], ids: list[int]) -> str:
    if found == ids:
        return f"prompts: the server's ids are those of training ({len(ids)} compared)"
    at = next((n for n, (a, b) in enumerate(zip(found, ids, strict=False)) if a != b), min(len(found), len(ids)))
    return (
        f"warning: the server's prompt differs from training at token {at} ({found[at : at + 3]} instead of "
        f"{ids[at : at + 3]}): its chat template or tokenizer is another, and the figures are those of that prompt"
    )
