"""A small text-to-SQL agent on the plain OpenAI SDK.

It shows a schema and a question to the model "main", asks for one SQL query, runs it on the database opened
read-only, shows a failure back once and asks again. The last query goes to `answer.sql` in the working
directory and to the last line of standard output. Whether the query is right is not decided here; a model
that gives no usable answer is no fault of this script, so it still exits with 0 and leaves an empty
`answer.sql`.

Environment: QUESTION, SCHEMA (CREATE TABLE text), DATABASE (path of a SQLite file; a relative one is looked
for in TEXT_TO_SQL_DATA, then in the working directory, then in `data` beside this file), MAX_TOKENS (48
when unset), and the OPENAI_* variables of the SDK.
"""

import os
import re
import sqlite3
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import OpenAI

SYSTEM = "Answer with one SQLite query only."
DEFAULT_MAX_TOKENS = 48  # the longest generated reference query has fewer tokens (SmolLM2 tokenizer)
MAX_ERROR_CHARS = 160  # SQLite quotes the whole statement in some errors; prompt tokens cost time
MAX_STEPS = 20_000_000  # virtual machine steps, about a second: a cross join must not hang the agent
VERBS = "SELECT|WITH|VALUES|INSERT|UPDATE|DELETE|REPLACE|DROP|CREATE|ALTER|ATTACH|DETACH|PRAGMA|VACUUM"

Message = dict[str, str]


def build_messages(schema: str, question: str) -> list[Message]:
    """The opening messages for one question: a one-line system message, then schema and question."""
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{schema.strip()}\n{question.strip()}"},
    ]


def build_retry(answer: str, error: str) -> list[Message]:
    """What is appended to the conversation after a query that failed."""
    short = " ".join(error.split())[:MAX_ERROR_CHARS]
    return [
        {"role": "assistant", "content": answer},
        {"role": "user", "content": f"Error: {short}\nGive the corrected query."},
    ]


def extract_sql(answer: str) -> str:
    """The first SQL statement of an answer, without its semicolon.

    Takes a code fence, a bare statement, or a statement after prose. A write statement is returned as it
    stands: hiding it would hide what the model tried. Raises ValueError when there is no statement.
    """
    fence = re.search(r"```(?:\w*\n)?(.*?)(?:```|\Z)", answer, flags=re.DOTALL)
    text = (fence.group(1) if fence else answer).strip()
    # Prose also says "select", so a lower-case verb counts only where a statement can begin.
    found = (
        re.match(rf"(?:{VERBS})\b", text, flags=re.IGNORECASE)
        or re.search(rf"(?:(?<=\n)|(?<=: )|(?<=`))(?:{VERBS})\b", text, flags=re.IGNORECASE)
        or re.search(rf"\b(?:{VERBS})\b", text)
    )
    if found is None:
        raise ValueError("no SQL query in the answer")
    return first_statement(text[found.start() :])


def first_statement(text: str) -> str:
    """`text` up to a semicolon, backtick fence or blank line that stands outside quotes, on one line."""
    quote = ""
    end = len(text)
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in ";`" or text.startswith("\n\n", i):
            end = i
            break
    return " ".join(text[:end].split())


def database_path(database: str) -> Path:
    """The file that DATABASE names; raises FileNotFoundError when no place has it."""
    roots = [Path.cwd(), Path(__file__).resolve().parent / "data"]
    if "TEXT_TO_SQL_DATA" in os.environ:
        roots.insert(0, Path(os.environ["TEXT_TO_SQL_DATA"]))
    for root in roots:
        path = root / database
        if path.is_file():
            return path.resolve()
    raise FileNotFoundError(
        f"no database {database!r} under {', '.join(map(str, roots))}: "
        "run generate.py, or set TEXT_TO_SQL_DATA to the folder that it wrote"
    )


def run_sql(sql: str, database: Path) -> None:
    """Run one query read-only; raises sqlite3.Error (or sqlite3.Warning) when it fails."""
    connection = sqlite3.connect(f"{database.as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        steps_left = [MAX_STEPS // 10_000]

        def out_of_steps() -> bool:
            steps_left[0] -= 1
            return steps_left[0] < 0

        connection.set_progress_handler(out_of_steps, 10_000)
        connection.execute(sql).fetchmany(100)
    finally:
        connection.close()


def ask(client: "OpenAI", messages: list[Message], max_tokens: int) -> str:
    """One model call; the text of its answer."""
    payload: Any = messages
    completion = client.chat.completions.create(model="main", messages=payload, max_tokens=max_tokens)
    return completion.choices[0].message.content or ""


def solve(client: "OpenAI", question: str, schema: str, database: Path, max_tokens: int) -> str:
    """The final query for one question, empty when neither answer held one."""
    messages = build_messages(schema, question)
    sql = ""
    for is_last in (False, True):
        answer = ask(client, messages, max_tokens)
        try:
            sql = extract_sql(answer)
            run_sql(sql, database)
            return sql
        except (ValueError, sqlite3.Error, sqlite3.Warning) as error:
            if not is_last:
                messages = messages + build_retry(answer, str(error))
    return sql


def main() -> int:
    from openai import OpenAI  # here, so that generate.py can share the prompt without the SDK's import time

    database = database_path(os.environ["DATABASE"])
    max_tokens = int(os.environ.get("MAX_TOKENS", DEFAULT_MAX_TOKENS))
    sql = solve(OpenAI(), os.environ["QUESTION"], os.environ["SCHEMA"], database, max_tokens)
    Path("answer.sql").write_text(sql, encoding="utf-8")
    print(sql or "-- no query")
    return 0


if __name__ == "__main__":
    sys.exit(main())
