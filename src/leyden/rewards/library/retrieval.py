"""Did the agent find the documents that the task needs.

What was retrieved is read from spans (an attribute that lists ids), or from the messages that tools wrote: there a
document counts at its first mention, and a mention is the id with no letter or digit beside it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from leyden.rewards.library.base import Evidence, Member, Settings


class RetrievalSettings(Settings):
    """`[rewards.settings.retrieval]`"""

    answer: str = ""
    """Key of the task's answer that names the wanted documents (a text or a list); empty: the whole answer."""
    spans: str = ""
    """Attribute of spans that lists retrieved ids in order; empty: mentions in messages of tools."""
    top: int = Field(0, ge=0)
    """Only the first so many retrieved documents count; 0 is all. Needs `spans`."""


def retrieval_scores(retrieved: Sequence[str], wanted: Sequence[str], top: int = 0) -> tuple[float, float, float]:
    """(hit: any wanted one was found, recall: share of the wanted ones, reciprocal rank of the first hit)."""
    ranked = list(dict.fromkeys(retrieved))[: top or None]
    hits = [rank for rank, one in enumerate(ranked, start=1) if one in set(wanted)]
    recall = len(hits) / len(set(wanted))
    return float(bool(hits)), recall, 1.0 / hits[0] if hits else 0.0


def _score(evidence: Evidence, settings: RetrievalSettings) -> dict[str, float]:
    answer = evidence.wanted(settings.answer)
    wanted = [str(one) for one in answer] if isinstance(answer, list) else [str(answer)]
    if settings.spans:
        found = [str(one) for span in evidence.trace.get("spans") or () for one in _ids(span, settings.spans)]
    else:
        found = _mentions(evidence.trace.get("messages") or (), wanted)
    hit, recall, rank = retrieval_scores(found, wanted, settings.top)
    return {"retrieval_hit": hit, "retrieval_recall": recall, "retrieval_rank": rank}


def _ids(span: Mapping[str, Any], attribute: str) -> Sequence[Any]:
    value = (span.get("attributes") or {}).get(attribute)
    return value if isinstance(value, list) else [] if value is None else [value]


def _mentions(messages: Sequence[Any], wanted: Sequence[str]) -> list[str]:
    places: list[tuple[int, int, str]] = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") != "tool":
            continue
        text = str(message.get("content") or "")
        for one in wanted:
            match = re.search(rf"(?<!\w){re.escape(one)}(?!\w)", text)
            if match:
                places.append((number, match.start(), one))
    return [one for _, _, one in sorted(places)]


MEMBER = Member(
    name="retrieval",
    says="the wanted documents were retrieved: any of them, the share of them, the reciprocal rank of the first",
    settings=RetrievalSettings,
    score=_score,
    components=("retrieval_hit", "retrieval_recall", "retrieval_rank"),
    answer_key=lambda settings: settings.answer,
)
