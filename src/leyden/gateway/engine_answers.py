"""What engines answer, looked at before it is believed: the shape of an answer, and errors in theirs."""

from typing import Any


def fault_of(answer: object) -> str | None:
    """Why `answer` cannot be an answer of a model, None if it can.

    Only the shape is checked; tokens are the business of `traces.tokens`.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list):
        return "answered without a list of choices"
    for choice in choices:
        if not isinstance(choice, dict) or not isinstance(choice.get("index", 0), int):
            return "answered with a choice of a wrong shape"
        message, logprobs = choice.get("message"), choice.get("logprobs")
        if logprobs is not None and not isinstance(logprobs, dict):
            return "answered with log-probabilities of a wrong shape"
        if message is not None and not _is_message(message):
            return "answered with a message of a wrong shape"
    return None


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("content"), str | None):
        return False
    calls = message.get("tool_calls")
    return calls is None or (
        isinstance(calls, list)
        and all(isinstance(call, dict) and isinstance(call.get("function"), dict | None) for call in calls)
    )


def error_of(answer: object, status: int, endpoint: str) -> tuple[str, str]:
    """(message, type) of an answer that is an error."""
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    if isinstance(error, dict):
        return str(error.get("message") or error), str(error.get("type") or "engine_error")
    return f"engine {endpoint} answered status {status}" + (f": {error}" if error else ""), "engine_error"
