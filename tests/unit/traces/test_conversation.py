"""The conversation of a request is found whichever API it came through."""

from typing import Any

import pytest

from leyden.traces.conversation import messages_of

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("request_body", "messages"),
    [
        ({"messages": [SYSTEM, USER]}, [SYSTEM, USER]),
        ({"messages": [USER], "system": "s"}, [SYSTEM, USER]),
        ({"input": "hi", "instructions": "s"}, [SYSTEM, USER]),
        ({"input": [USER]}, [USER]),
        ({"prompt": "hi"}, []),
        ({"messages": "withheld"}, []),
    ],
)
def test_the_messages_are_found_with_the_instructions_first(request_body: dict[str, Any], messages: list[Any]) -> None:
    assert messages_of(request_body) == messages
