"""Varied strings for the comparison of tokenizers: what these agents read and write, and what breaks tokenizers."""

import random

PIECES = [
    "SELECT", "COUNT(*)", "FROM", "customer", "WHERE", "t1.id = t2.id", "'O''Brien'", ">= 3.14", "GROUP BY", "LIMIT 10;", "\n",
    "def f(x):\n    return x ** 2\n", "\t\tif (a && b) { x += 1; }\r\n", "{\"name\": \"execute_sql\", \"arguments\": {}}", "</td>",
    "https://example.org/a?b=c&d=%20", "0x1F", "1e-9", "2024-02-29", "12345678901234567890", "007", "3.141592653589793", "½ ² ③",
    "医生", "请列出所有姓名。", "数据库：", "患者年龄大于60岁", "漢字かな交じり文", "안녕하세요", "Привет, мир", "مرحبا", "नमस्ते", "Ünïcödé", "façade",
    "😀", "👩‍👩‍👧‍👦", "🇫🇷", "👍🏽", "™", "—", "…", "«quoted»", "\u00a0", "\u200b", "\u3000", "\ufeff", "\u2028",
    " ", "  ", "   ", "\t", "\n\n", "\n\n\n", " \n ", "\r\n", "\r", "I'm", "they'LL", "don't", "'s", "it's", "WE'VE", "_", "__init__",
    "...", "!!!", "#####", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "<answer>72</answer>", "a", "Z", "é",
]  # fmt: skip


def strings(special: list[str], n: int = 600) -> list[str]:
    """Each piece and each special token alone, then random mixtures of both with and without spaces between."""
    rng, pieces = random.Random(7), PIECES + special
    out = pieces + [f" {p}" for p in pieces] + [f"{p} " for p in pieces]
    while len(out) < n:
        glue = rng.choice(["", " ", "  ", "\n"])
        out.append(glue.join(rng.choices(pieces, k=rng.randint(2, 12))))
    return out
