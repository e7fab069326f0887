"""report.html in a real headless Chromium: it draws, stays in its window, is readable, answers keys, and runs nobody's text."""

import random

import pytest

from core.report import write_page
from tests.chromium import BINARY, Chromium
from tests.report_runs import SQL, episode, write_curves, write_episodes, write_lines, write_manifest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BINARY is None, reason="no Chromium on this machine (apt install chromium)"),
]

READY = "document.querySelector('.item') !== null"
SELECTED = "document.querySelector('.item[aria-selected=true] .id').textContent"
COUNT = "document.querySelector('.filters .count').textContent"
# every visible text against the colours it stands on: the ones that miss WCAG AA
LOW_CONTRAST = """(() => {
  const parse = (c) => { const n = c.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const light = (c) => c.slice(0, 3).map((v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4).reduce((s, v, i) => s + v * [.2126, .7152, .0722][i], 0);
  const ground = (node) => { for (; node; node = node.parentElement) { const c = parse(getComputedStyle(node).backgroundColor); if (c[3] === 1) return c; } return [255, 255, 255, 1]; };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), low = [];
  for (let node; (node = walker.nextNode());) {
    const parent = node.parentElement;
    if (!node.data.trim() || !parent.checkVisibility() || parent.closest('script, .sr, .skip')) continue;
    const style = getComputedStyle(parent), [a, b] = [light(parse(style.color)), light(ground(parent))].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < (parseFloat(style.fontSize) >= 24 ? 3 : 4.5)) low.push(`${node.data.trim().slice(0, 30)} ${ratio.toFixed(2)}`);
  }
  return low;
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium = Chromium(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "demo"
    rng = random.Random(0)
    verdicts = {
        s: [rng.random() < share for _ in range(40)] for s, share in (("base", 0.1), ("sft", 0.4), ("grpo", 0.6))
    }
    verdicts["sft"][3] = None
    write_curves(write_episodes(run, verdicts))
    for folder in ("sft", "grpo", "eval"):
        write_manifest(run / folder)
    return write_page(run, run / "eval")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 400])
def test_draws_in_its_window_and_is_readable(browser, page, width, dark):
    browser.open(page, "", width, 900, dark)
    browser.until(READY)
    browser.js("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert browser.js("document.documentElement.scrollWidth <= innerWidth")
    assert browser.js("document.documentElement.hasAttribute('data-dark')") is dark
    assert browser.js(LOW_CONTRAST) == []
    browser.js("document.documentElement.style.setProperty('--soft', '#777')")
    assert browser.js(LOW_CONTRAST) != []  # the check can fail
    assert browser.js("document.querySelectorAll('.chart').length") == 3 + 8
    assert browser.js("document.querySelectorAll('#results tbody tr').length") >= 3
    assert browser.errors == [] and [r for r in browser.requests if not r.startswith(("file:", "about:"))] == []


def test_theme_button_outlives_the_page(browser, page):
    browser.open(page)
    for wanted in (False, True):  # auto -> light -> dark
        browser.js("document.getElementById('theme').click()")
        assert browser.js("document.documentElement.hasAttribute('data-dark')") is wanted
    browser.js("localStorage.clear()")


def test_keys_filters_and_addresses(browser, page):
    browser.open(page, "#episode=dev-7")
    browser.until(READY)
    assert browser.js(SELECTED) == "dev-7"
    browser.key("j", "j"), browser.key("j", "j"), browser.key("k", "k")
    assert browser.js(SELECTED) == "dev-8" and browser.js("location.hash") == "#episode=dev-8"
    browser.js("document.querySelector('.list').focus()")
    browser.key("End")
    assert browser.js(SELECTED) == "dev-39"
    browser.key("/", "/")
    assert browser.js("document.activeElement.type") == "search"
    browser("Input.insertText", text="kind dev-3?")
    assert browser.js(COUNT) == "1 of 40 questions" and browser.js(SELECTED) == "dev-3"
    assert "undecided" in browser.js("document.querySelector('.columns').textContent")
    browser.js("location.hash = '#episode=dev-20'")  # hidden by the search: the address wins
    browser.until(f"{SELECTED} === 'dev-20'")
    assert browser.js(COUNT) == "40 questions"
    browser.js("location.hash = '#episode=nobody'")
    browser.until("document.querySelector('.detail').textContent.includes('no question nobody')")


def test_fixed_and_broken_lead_to_their_questions(browser, page):
    browser.open(page)
    browser.until(READY)
    fixed = browser.js("document.querySelectorAll('.figure')[2].querySelector('button').textContent")
    browser.js("document.querySelectorAll('.figure')[2].querySelector('button').click()")
    assert browser.js(COUNT).split()[0] == fixed.split()[0] != "0"
    assert browser.js("[...document.querySelectorAll('.item .marks')].every((m) => m.textContent.endsWith('✗✓'))")
    browser.js("document.querySelectorAll('#breakdown .group button')[0].click()")
    assert browser.js(COUNT) == "10 of 40 questions"


def test_messages_are_told_apart(browser, page):
    browser.open(page, "#episode=dev-1")
    browser.until(READY)
    column = "document.querySelector('.column[aria-label=grpo]')"
    assert browser.js(f"[...{column}.querySelectorAll('.message .role span:first-child')].map((s) => s.textContent)") == [
        "assistant", "tool execute_sql", "assistant"]  # fmt: skip
    assert browser.js(f"{column}.querySelectorAll('.message .masked').length") == 1
    assert browser.js(f"[...{column}.querySelectorAll('.grid td')].map((c) => c.textContent)") == [
        "'a | b'",
        "2",
        "Bay Star",
        "1",
    ]
    assert browser.js(f"{column}.querySelector('.call pre').textContent") == SQL
    assert browser.js(f"[...{column}.querySelectorAll('.call .kw')].length") == 8
    assert browser.js(f"[...{column}.querySelectorAll('.strip i')].map((i) => i.className)") == ["own", "", "own"]
    assert browser.js(f"{column}.querySelector('.think').textContent") == "<think>short</think>"


def test_curves_answer_pointer_keys_and_slider(browser, page):
    browser.open(page, "#training")
    chart = "[...document.querySelectorAll('.chart')].find((c) => c.querySelector('h4').textContent === 'KL')"
    assert browser.js(f"{chart}.querySelector('.num').textContent") == "0.6"
    browser.js(f"{chart}.querySelector('.plot').focus()")
    browser.key("ArrowLeft")
    assert browser.js(f"{chart}.querySelector('.num').textContent") == "0.59"
    assert "at step 59" in browser.js("[...document.querySelectorAll('.plot')].at(-1).getAttribute('aria-label')")
    before = browser.js(f"{chart}.querySelector('path.line').getAttribute('d')")
    browser.js("{const s = document.getElementById('smoothing'); s.value = 0; s.dispatchEvent(new Event('input'));}")
    assert browser.js(f"{chart}.querySelector('path.line').getAttribute('d')") != before


EVIL = "</script><script>window.pwned=1</script><img src=x onerror='window.pwned=1'><svg onload=window.pwned=1>\"'${1}{{script}}\u2028\ud800"


def test_text_of_a_model_never_runs(browser, tmp_path):
    call = {"type": "function", "function": {"name": EVIL, "arguments": {EVIL: EVIL, "javascript:": [EVIL]}}}
    completion = [{"role": "assistant", "content": EVIL, "tool_calls": [call]}, {"role": "tool", "name": EVIL, "content": EVIL},
                  {"role": EVIL, "content": None}, {"role": "assistant", "content": f"```sql\n{EVIL}"}]  # fmt: skip
    evil = {
        "question": EVIL,
        "gold": EVIL,
        "task": EVIL,
        "hardness": EVIL,
        "db_id": EVIL,
        "answer": EVIL,
        "error": EVIL,
    }
    rows = [
        episode(i, s, True, completion=completion, rewards={EVIL: 5.0}, **evil)
        for s in ("base", EVIL)
        for i in (EVIL, "__proto__", "b")
    ]
    write_lines(tmp_path / "eval" / "episodes.jsonl", rows)
    write_lines(
        tmp_path / "grpo" / "metrics.jsonl",
        [{"step": s, "time": 1.0 * s, EVIL: 1.0, "constructor": 2.0} for s in (1, 2)],
    )
    browser.open(write_page(tmp_path, tmp_path / "eval"))
    browser.until(READY)
    assert browser.js("document.querySelectorAll('.item').length") == 3
    browser.js("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    for _ in range(3):
        browser.key("j", "j")
    browser.js("document.querySelectorAll('.group button').forEach((b) => b.click())")
    assert EVIL[:40] in browser.js("document.querySelector('.columns').textContent")
    assert browser.js("document.querySelectorAll('img, main script, main svg[onload], iframe').length") == 0
    assert browser.js("window.pwned === undefined") and browser.errors == []
    assert [r for r in browser.requests if not r.startswith(("file:", "about:"))] == []
    # and should text ever become a script, the page's policy refuses it
    browser.js(
        "{const s = document.createElement('script'); s.textContent = 'window.pwned = 1'; document.body.append(s);}"
    )
    assert browser.js("window.pwned === undefined")


@pytest.mark.parametrize(
    ("verdicts", "curves", "says"),
    [
        ({}, True, ["has not been evaluated yet", "python step5_eval.py", "grpo60 logged steps so far"]),
        ({"served": [True, False]}, False, ["the starting point", "No training has logged anything yet"]),
        ({"base": [None, None], "sft": [None, None]}, False, ["2 undecided", "no decided question shared with base"]),
    ],
)
def test_runs_with_little_in_them(browser, tmp_path, verdicts, curves, says):
    run = write_episodes(tmp_path, verdicts)
    if curves:
        write_curves(run)
    for width in (1280, 400):
        browser.open(write_page(run, run / "eval"), "", width)
        if verdicts:
            browser.until(READY)
        text = browser.js("document.querySelector('main').textContent")
        assert [s for s in says if s not in text] == [] and browser.errors == []
        assert (
            browser.js("document.documentElement.scrollWidth <= innerWidth")
            and "NaN" not in text
            and "undefined" not in text
        )


def test_five_thousand_questions(browser, tmp_path):
    rng = random.Random(0)
    levels = {"base": 0.1, "sft": 0.4, "grpo": 0.6}
    run = write_episodes(tmp_path, {s: [rng.random() < p for _ in range(5000)] for s, p in levels.items()})
    page = write_page(run, run / "eval")
    browser.open(page)
    browser.until(READY)
    assert browser.js("document.querySelectorAll('.item').length") < 60 and page.stat().st_size < 20e6
    browser.js("document.querySelector('.list').scrollTop = 54 * 2500")
    browser.until("document.querySelector('.item .id').textContent.startsWith('dev-24')")
    browser.js(
        "{const s = document.querySelector('[type=search]'); s.value = 'dev-4999'; s.dispatchEvent(new Event('input'));}"
    )
    assert browser.js(COUNT) == "1 of 5,000 questions"
