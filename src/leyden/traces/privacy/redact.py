"""Redaction of JSON bodies: every text in them, keys included, goes through the redactor.

Token ids and log-probabilities are text in other letters (`strip_tokens`): a body of which a text was changed
may not keep them. Ids that came instead of a text cannot be redacted at all and count as changed.
"""

from collections.abc import Callable, Mapping
from typing import Any

WITHHELD = "[withheld]"
"""Stands where token ids or their spellings were."""

_TOKEN_KEYS = frozenset(
    {
        "bytes",
        "completion_ids",
        "completion_token_ids",
        "logprobs",
        "output_token_ids",
        "prompt_ids",
        "prompt_logprobs",
        "prompt_token_ids",
        "response_log_probs",
        "response_token_ids",
        "token_ids",
        "token_logprobs",
        "tokens",
        "top_logprobs",
    }
)
"""Keys of the answers of engines and providers under which ids, or texts cut into tokens, are found."""


def redact(value: Any, redactor: Callable[[str], str]) -> tuple[Any, bool]:
    """(`value` with every text redacted, whether anything changed). Token ids in place of a prompt are
    withheld."""
    if isinstance(value, str):
        text = redactor(value)
        return text, text != value
    if isinstance(value, Mapping):
        return _redact_mapping(value, redactor)
    if isinstance(value, list | tuple):
        pairs = [redact(item, redactor) for item in value]
        return [item for item, _ in pairs], any(changed for _, changed in pairs)
    return value, False


def strip_tokens(value: Any) -> Any:
    """`value` without ids, log-probabilities and texts cut into tokens."""
    if isinstance(value, Mapping):
        return {
            key: WITHHELD if key in _TOKEN_KEYS and isinstance(item, list | tuple | Mapping) else strip_tokens(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [strip_tokens(item) for item in value]
    return value


def _redact_mapping(value: Mapping[str, Any], redactor: Callable[[str], str]) -> tuple[dict[str, Any], bool]:
    redacted: dict[str, Any] = {}
    changed = False
    for key, item in value.items():
        name = redactor(key)
        if name != key:
            changed = True
            # Two keys may become one; the later ones are numbered so that no value is lost.
            base, number = name, 2
            while name in redacted or name in value:
                name, number = f"{base}#{number}", number + 1
        if key == "prompt" and _are_ids(item):
            redacted[name], changed = WITHHELD, True
            continue
        redacted[name], item_changed = redact(item, redactor)
        changed = changed or item_changed
    return redacted, changed


def _are_ids(value: Any) -> bool:
    """Whether a prompt is given as ids, or as a list of such."""
    return isinstance(value, list) and bool(value) and (isinstance(value[0], int) or _are_ids(value[0]))
