"""Ollama: a Modelfile whose TEMPLATE renders what was trained.

Ollama (0.9 or newer) reads GGUF and renders with Go's text/template. Without a TEMPLATE some versions guess one from
the GGUF's Jinja and others send the bare text, so it is written out here: core/agent.gotmpl, the twin of agent.jinja.
"""

import json
import os
import shutil
from pathlib import Path

from core.artifacts import atomic_dir
from core.chat import FAMILIES, family_of
from core.config import UserError

TEMPLATE = Path(__file__).with_name("agent.gotmpl")
MARKERS = ("role_open", "role_close", "turn_end", "turn_sep")


def ollama_template(family: str) -> str:
    """The Go text for a family. No BOS: llama.cpp adds it where the GGUF says so."""
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, was, now in zip(MARKERS, FAMILIES["chatml"], FAMILIES[family], strict=True):
        text = text.replace(f"${name} := {json.dumps(was)}", f"${name} := {json.dumps(now)}")
    return text


def modelfile(family: str, model: str, num_ctx: int, temperature: float, system: str = "") -> str:
    """`model` is the GGUF's name beside the Modelfile."""
    if '"""' in system + '""':
        raise UserError(
            'the system prompt contains """ or ends with ", which ends a text in a Modelfile. Change the prompt, or leave '
            "ollama out of --formats"
        )
    opening, _, end, _ = FAMILIES[family]
    lines = [f"FROM ./{model}", f'TEMPLATE """{ollama_template(family)}"""']
    lines += [f'PARAMETER stop "{marker}"' for marker in (end, opening)]
    lines += [f"PARAMETER num_ctx {num_ctx}", f"PARAMETER temperature {temperature:g}"]
    lines.append("PARAMETER repeat_penalty 1")  # until 2026-08 Ollama's own is 1.1: words of the prompt became rarer
    if temperature:  # as evaluation samples: from all tokens
        lines += ["PARAMETER top_k 0", "PARAMETER top_p 1", "PARAMETER min_p 0"]
    if system:
        lines.append(f'SYSTEM """{system}"""')
    return "\n".join(lines) + "\n"


def write_ollama(hf_folder: Path, gguf: Path, target: Path, num_ctx: int, temperature: float, system: str = "") -> str:
    """Folder `target` with the GGUF (a hard link where the disk allows it) and its Modelfile; returns Ollama's command."""
    from transformers import AutoTokenizer

    family = family_of(AutoTokenizer.from_pretrained(str(hf_folder)))
    with atomic_dir(target) as tmp:
        try:
            os.link(gguf, tmp / gguf.name)
        except OSError:
            shutil.copy2(gguf, tmp / gguf.name)
        text = modelfile(family, gguf.name, num_ctx, temperature, system)
        (tmp / "Modelfile").write_text(text, encoding="utf-8")
    return f"ollama create {gguf.stem.lower()} -f {target / 'Modelfile'}"
