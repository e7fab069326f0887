"""Conversations that templates of other engines must render as the training template does."""

SQL = {
    "type": "function",
    "function": {
        "name": "execute_sql",
        "description": "Run one read-only SQL query and return its rows. At most <10> rows & no more.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "The query."}},
            "required": ["query"],
        },
    },
}
PLOT = {
    "type": "function",
    "function": {
        "name": "plot",
        "description": 'Draw "x" over y.',
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "string", "description": name} for name in ("y", "x", "title")},
            "required": ["x", "y"],
        },
    },
}


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def tool(text, name="execute_sql"):
    return {"role": "tool", "name": name, "content": text}


def say(text, thought="", calls=()):
    message = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    return message


def sql(query, text="", thought=""):
    return say(text, thought, [("execute_sql", {"query": query})])


ODD = 'a "quoted" \\ back\\u003cslash \t tab \b\f\r \x01\x7f \u2028\u2029 \u00a0\u3000\u200b <|im_start|> {{ .System }} {% if %}'

# name -> (messages, tools); the last message is never the assistant's
CONVERSATIONS = {
    "no system": ([user("hi")], None),
    "system": ([system("Be brief."), user("hi")], None),
    "empty system": ([system(""), user("hi")], None),
    "tools": ([system("Be brief."), user("How many?")], [SQL]),
    "tools, no system": ([user("How many?")], [SQL, PLOT]),
    "one call": ([user("How many?"), sql("SELECT COUNT(*) FROM t"), tool("3")], [SQL]),
    "comparison, no spaces": (
        [user("Who?"), sql("SELECT a FROM t WHERE b<5 AND c>=2 OR d & 1"), tool("a\n<b>&amp;")],
        [SQL],
    ),
    "words and a call": ([user("Who?"), sql("SELECT 1", "Let me look."), tool("1")], [SQL]),
    "words as servers return them": (
        [user("Who?"), sql("SELECT 1", "Look.\n"), tool("1"), sql("2", "\n"), tool("2")],
        [SQL],
    ),
    "thoughts": ([user("Who?"), sql("SELECT 1", "Now.", "First\nthe <table>."), tool("1"), user("and?")], [SQL]),
    "thoughts kept in the text": ([user("Who?"), say("<think>hm</think>\nAnn."), user("sure?")], None),
    "several calls": (
        [
            user("Both?"),
            say("", "", [("execute_sql", {"query": "SELECT 1"}), ("execute_sql", {"query": "SELECT 2"})]),
            tool("1"),
            tool("2"),
        ],
        [SQL],
    ),
    "several calls after words": (
        [
            user("All?"),
            say("Three.", "", [("execute_sql", {"query": f"SELECT {n}"}) for n in range(3)]),
            *(tool(str(n)) for n in range(3)),
            say("0, 1, 2"),
            user("again"),
        ],
        [SQL],
    ),
    "error and rewrite": (
        [
            system("Be brief."),
            user("Who?"),
            sql("SELECT nam FROM t"),
            tool("Error: no such column: nam"),
            sql("SELECT name FROM t", "Wrong column."),
            tool("name\nAnn"),
            say("```sql\nSELECT name FROM t\n```"),
            user("Thanks. And how old?"),
        ],
        [SQL],
    ),
    "unicode": (
        [system("简短。"), user("李雷多大?🙂"), sql("SELECT 年龄 FROM 人 WHERE 名 = '李雷🙂'"), tool("年龄\n22 岁")],
        [SQL],
    ),
    "quotes, escapes, markup": ([user(ODD), sql(ODD, ODD), tool(ODD), say(ODD), user(ODD)], [SQL]),
    "empty content": ([user(""), say(""), user(""), sql(""), tool("")], [SQL]),
    "no arguments": ([user("x"), say("", "", [("execute_sql", {})]), tool("Error")], [SQL]),
    "nested arguments": (
        [
            user("plot"),
            say("", "", [("plot", {"title": "a<b", "x": [1, 2.5, "<", None, True, []], "y": {"k": {}, "l": ["&"]}})]),
            tool("done", "plot"),
        ],
        [PLOT],
    ),
    "system in the middle": ([user("a"), say("b"), system("From now on in French."), user("c")], None),
    "system second": ([user("a"), system("In French."), user("c")], None),
    "lines": ([user("\n a \n\n"), say("\n b \n"), user("  ")], None),
    "long query": ([user("x"), sql("SELECT '" + "é<\\" * 1500 + "'"), tool("y" * 3000)], [SQL]),
}
