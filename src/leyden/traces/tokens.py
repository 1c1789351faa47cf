"""Token ids and log-probs as an engine gave them, or the name of why they are refused for training.

It promises that accepted tokens are exactly what the engine reported and agree with each other and with the
engine's own counts. It never raises for a fault of an engine, never repairs, and never looks at the text: a
refused call is still answered and recorded, only not trained on.

Letters: P = prompt tokens, R = completion tokens of a choice.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from leyden.base.records import Choice, FloatArray, IntArray, Provenance

Refusal = Literal[
    "no_choices",
    "missing_prompt_ids",
    "missing_completion_ids",
    "bad_token_id",
    "missing_logprobs",
    "length_mismatch",
    "bad_logprob",
    "usage_mismatch",
]
"""Why tokens are refused; where several hold, the first in this order is named."""

MAX_LOGPROB = 1e-3
"""A log-probability is at most 0; up to here it is rounding of the engine, above it is no log-probability."""
MIN_LOGPROB = float(np.finfo(np.float32).min)
"""Below it a float32 is infinite."""

_NO_IDS: IntArray = np.zeros(0, np.int32)
_NO_LOGPROBS: FloatArray = np.zeros(0, np.float32)
_NO_IDS.setflags(write=False)
_NO_LOGPROBS.setflags(write=False)
_INT32 = np.dtype("<i4")
_NUMBER = frozenset({int, float})


@dataclass(slots=True)
class RawChoice:
    """One answer as it came over the wire."""

    index: int
    """Position among the choices of its call."""
    completion_ids: list[int] | None
    """Sampled ids, or None if the engine gave none; R of them."""
    logprobs: list[float] | None
    """One per id, or None if the engine gave none."""
    finish_reason: str
    """As the engine named it."""
    text: str = ""
    """For people."""


class Tokens(NamedTuple):
    """The tokens of one call and whether they may be trained on."""

    prompt_ids: IntArray
    """What the engine read; shape (P,); empty if unknown."""
    choices: list[Choice]
    """One per raw choice, in the same order."""
    provenance: Provenance
    """`served` if ids are known, else `retokenized`."""
    refusal: Refusal | None
    """None: may be trained on."""


def checked(prompt_ids: list[int] | None, choices: Sequence[RawChoice], usage: Mapping[str, Any] | None) -> Tokens:
    """The tokens of a call, accepted or refused by name. Never raises for what an engine may answer.

    Without ids (missing, or not token ids) all arrays are empty and the provenance is `retokenized`.
    Log-probs with a fault are NaN beside their ids. An empty completion is accepted; an empty prompt is not,
    since its first sampled token would follow nothing. `usage` is checked for the counts it brings:
    `prompt_tokens`, and `completion_tokens` as the sum over choices.
    """
    if not choices:
        return _without_ids(choices, "no_choices")
    if not prompt_ids:
        return _without_ids(choices, "missing_prompt_ids")
    if any(choice.completion_ids is None for choice in choices):
        return _without_ids(choices, "missing_completion_ids")
    prompt_P = _ids(prompt_ids)
    ids = [_ids(choice.completion_ids) for choice in choices]
    if prompt_P is None or any(ids_R is None for ids_R in ids):
        return _without_ids(choices, "bad_token_id")
    made: list[Choice] = []
    faults: set[Refusal] = set()
    num_sampled = 0
    for raw, ids_R in zip(choices, ids, strict=True):
        assert ids_R is not None
        logprobs_R, fault = _logprobs(raw.logprobs, len(ids_R))
        if fault is not None:
            faults.add(fault)
        num_sampled += len(ids_R)
        made.append(
            Choice(
                index=raw.index,
                completion_ids=ids_R,
                logprobs=logprobs_R,
                finish_reason=raw.finish_reason,
                text=raw.text,
            )
        )
    refusal: Refusal | None = None
    if faults:
        refusal = next(name for name in _LOGPROB_FAULTS if name in faults)
    elif usage and not _usage_agrees(usage, len(prompt_P), num_sampled):
        refusal = "usage_mismatch"
    return Tokens(prompt_P, made, Provenance.SERVED, refusal)


_LOGPROB_FAULTS: tuple[Refusal, ...] = ("missing_logprobs", "length_mismatch", "bad_logprob")


def _without_ids(choices: Sequence[RawChoice], refusal: Refusal) -> Tokens:
    made = [
        Choice(
            index=raw.index,
            completion_ids=_NO_IDS,
            logprobs=_NO_LOGPROBS,
            finish_reason=raw.finish_reason,
            text=raw.text,
        )
        for raw in choices
    ]
    return Tokens(_NO_IDS, made, Provenance.RETOKENIZED, refusal)


def _ids(ids: object) -> IntArray | None:
    """The ids as an array, or None if they are no list of token ids (a bool is none)."""
    if not isinstance(ids, list):
        return None
    if not ids:
        return _NO_IDS
    try:  # packing is three times faster than numpy's reading of a list, and it checks type and range
        packed = struct.pack(f"<{len(ids)}i", *ids)
    except struct.error:
        return None
    array = np.frombuffer(packed, _INT32)
    lowest = int(np.minimum.reduce(array))  # what `min` does, without its wrapper
    if lowest < 0:
        return None
    if lowest <= 1:  # packing takes a bool for 0 or 1
        doubtful = np.flatnonzero(array <= 1).tolist()
        if any(type(ids[place]) is not int for place in doubtful):
            return None
    return array


def _logprobs(logprobs: object, num_ids: int) -> tuple[FloatArray, Refusal | None]:
    """(log-probs of shape (R,), what is wrong with them); NaN where something is."""
    fault: Refusal | None = None
    if logprobs is None:
        fault = "missing_logprobs" if num_ids else None  # where nothing was sampled, nothing is missing
    elif not isinstance(logprobs, list):
        fault = "bad_logprob"
    elif len(logprobs) != num_ids:
        fault = "length_mismatch"
    elif num_ids:
        if _NUMBER.issuperset(map(type, logprobs)) and _in_range(logprobs):
            return np.array(logprobs, np.float32), None
        fault = "bad_logprob"
    return (np.full(num_ids, np.nan, np.float32) if num_ids else _NO_LOGPROBS), fault


def _in_range(logprobs: list[float]) -> bool:
    # min and max pass over a NaN that is not the first, the sum does not; it comes last since an integer
    # beyond float would raise there. Plain Python: numpy costs more below some 200 numbers.
    return min(logprobs) >= MIN_LOGPROB and max(logprobs) <= MAX_LOGPROB and not math.isnan(sum(logprobs))


def _usage_agrees(usage: Mapping[str, Any], num_prompt: int, num_sampled: int) -> bool:
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return (prompt is None or prompt == num_prompt) and (completion is None or completion == num_sampled)
