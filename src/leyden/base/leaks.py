"""Is something that would be trained on a task of the holdout, word for word or nearly so?

Promises: equal inputs are always found, whatever the threshold and the case or spacing of their text; what is
near is found by a similarity that does not depend on the order of tasks; comparing is exact (no hashing, no
sampling) and linear in the shared words. By itself it does not understand meaning: a paraphrase that keeps few of the
words is missed (docs/evaluation.md has the measured recall), unless a sentence model helps.

How near. The texts of a task's `input` are cut into words; its shingles are the single words and the pairs of
neighbours. A word weighs `log(1 + T / d)` where d of T tasks of the holdout have it, so what every task says ("list
all ...") weighs little and names weigh much; a pair weighs a quarter of that, so that order matters but a moved
clause does not hide a copy. The similarity of two tasks is the weighted Jaccard index of their shingles: weight of
the common ones over weight of all. Of a conversation and a task it is the containment: weight of the task's shingles
found in the conversation, over all of them.

Literals. Numbers and quoted texts must agree: "over 90 days" and "over 30 days" are two tasks of one mould. In a
conversation those of the task must all occur.

Context. A text that several tasks of the holdout have verbatim (a schema, an instruction) is context. It is compared
apart from the rest, and the similarity is the smaller of the two: the same question about another database is
another task, and two questions about one database are not alike because of the database.

Meaning. With a sentence model two tasks are also near when the cosine of the vectors of their own texts is high enough
and their literals agree. Of a conversation each message that is not the assistant's is compared.

Letters of shapes: H = tasks of the holdout, S = distinct shingles, Q = things that are asked about.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

from leyden.base.errors import HoldoutError
from leyden.base.records import Task, to_json
from leyden.base.tasks import Demo

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NEAR = 0.7
"""Default threshold of similarity: light paraphrases lie above it, different tasks of one mould below (measured in
docs/evaluation.md)."""

Vectors: TypeAlias = "NDArray[np.float32]"
"""Shape (N, E)."""
Embed: TypeAlias = Callable[[Sequence[str]], "NDArray[np.float32]"]
"""Texts to vectors of length one."""

CONTAINED = 0.85
"""Smallest threshold of containment: a conversation has many words, some of which it shares with a task by chance."""

_CONTEXT_TASKS = 3
"""A text that so many tasks of the holdout share is context: twins (a task and its leak) are two."""

_NUM_NAMED = 5
"""Leaks that a message names; more make it unreadable."""

_PAIR = 0.25
"""Weight of a pair of words against that of one. With 1 a moved clause hides a copy (light rewordings of the test
set fall to 0.5); with 0 the order of words means nothing."""

_LITERAL = re.compile(r"\d+(?:[.,]\d+)*|(?<!\w)'([^'\n]{1,80})'(?!\w)|\"([^\"\n]{1,80})\"")
_WORD = re.compile(r"[^\W_]+(?:[.,]\d+)*")
_CHUNK = 512
"""Things compared at once: their similarities to 10,000 holdout tasks take 40 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """Something to be trained on that is like a task of the holdout."""

    asked: str
    """Id of the task or demonstration that would be trained on."""
    holdout: str
    """Id of the task of the holdout."""
    similarity: float
    """1 for equal inputs or the same id; else from the threshold up."""
    by_meaning: bool = False
    """Whether only a sentence model found it; `similarity` is the cosine then."""

    def __str__(self) -> str:
        how = "is" if self.similarity == 1 else f"is {100 * self.similarity:.0f} % like"
        return f"{self.asked!r} {how} {self.holdout!r}" + (" (by meaning)" if self.by_meaning else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """A sentence model that helps."""

    embed: Embed
    """The model."""
    cosine: float
    """From which cosine on two tasks are near."""


class Guard:
    """Knows a holdout and recognises its tasks. Immutable after it is made, so threads may share it."""

    def __init__(self, holdout: Sequence[Task], *, threshold: float = NEAR, meaning: Meaning | None = None) -> None:
        """`threshold` is the similarity from which a task counts as near, 1 for equal ones only (and no `meaning`).

        Raises HoldoutError for a threshold outside (0, 1].
        """
        if not 0 < threshold <= 1:
            raise HoldoutError(f"threshold {threshold} of near-duplicates is not above 0 and at most 1; 0.7 is usual")
        self.threshold = threshold
        self._ids = [task.id for task in holdout]
        self._known = set(self._ids)
        self._exact = {_canonical(task.input): task.id for task in reversed(holdout)}
        texts = [_texts(task.input) for task in holdout]
        common = Counter(text for one in texts for text in set(one))
        self._context = {text for text, count in common.items() if count >= _CONTEXT_TASKS}
        self._own, self._shared = _Index(), _Index()
        self._literals: list[frozenset[str]] = []
        for one in texts:
            part = self._parts(one)
            self._own.add(part.own)
            self._shared.add(part.shared)
            self._literals.append(part.literals)
        self._meaning = meaning if threshold < 1 else None
        if self._meaning:
            self._vectors_HE = self._meaning.embed([self._own_text(one) for one in texts])

    @property
    def num_tasks(self) -> int:
        """Tasks of the holdout."""
        return len(self._ids)

    def of_tasks(self, tasks: Sequence[Task]) -> list[Leak]:
        """Leaks among `tasks` by id, by equal input, or by similarity; at most one, the nearest, per task."""
        found = {
            position: Leak(asked=task.id, holdout=self._same(task) or task.id, similarity=1.0)
            for position, task in enumerate(tasks)
            if task.id in self._known or self._same(task)
        }
        if self.threshold < 1:
            rest = [position for position in range(len(tasks)) if position not in found]
            parts = [self._parts(_texts(tasks[position].input)) for position in rest]
            for position, (held, near) in zip(rest, self._nearest(parts, contained=False), strict=True):
                if near >= self.threshold:
                    found[position] = Leak(
                        asked=tasks[position].id, holdout=self._ids[held], similarity=min(near, 0.999)
                    )
            left = [position for position in rest if position not in found]
            asked = [[_texts(tasks[position].input)] for position in left]
            alike = self._alike([tasks[position].id for position in left], asked)
            found |= {position: leak for position, leak in zip(left, alike, strict=True) if leak}
        return [found[position] for position in sorted(found)]

    def of_demos(self, demos: Sequence[Demo]) -> list[Leak]:
        """Demonstrations of a holdout task, by the id they name or by what their conversation was asked.

        Everything but the assistant's words counts as asked.
        """
        asked = [self._parts(_texts([m for m in demo.messages if m["role"] != "assistant"])) for demo in demos]
        limit = max(self.threshold, CONTAINED)
        said = [[_texts(m.get("content")) for m in demo.messages if m["role"] != "assistant"] for demo in demos]
        alike = self._alike([demo.task for demo in demos], said)
        found = []
        for demo, (held, near), leak in zip(demos, self._nearest(asked, contained=True), alike, strict=True):
            if demo.task in self._known:
                found.append(Leak(asked=demo.task, holdout=demo.task, similarity=1.0))
            elif near >= limit:
                found.append(Leak(asked=demo.task, holdout=self._ids[held], similarity=min(near, 0.999)))
            elif leak:
                found.append(leak)
        return found

    def similarity(self, tasks: Sequence[Task]) -> list[float]:
        """How near each task is to the nearest one of the holdout, 0 to 1; for choosing a threshold."""
        parts = [self._parts(_texts(task.input)) for task in tasks]
        return [near for _, near in self._nearest(parts, contained=False)]

    def _alike(self, names: Sequence[str], asked: Sequence[Sequence[Sequence[str]]]) -> list[Leak | None]:
        """For each thing, of which `asked` has the texts of each of its parts: the leak that the model sees."""
        found: list[Leak | None] = [None] * len(names)
        whose = [number for number, parts in enumerate(asked) for _ in parts]
        texts = [texts for parts in asked for texts in parts]
        if not self._meaning or not texts or not self._ids:
            return found
        for start in range(0, len(texts), _CHUNK):
            chunk = texts[start : start + _CHUNK]
            near_QH = self._meaning.embed([self._own_text(one) for one in chunk]) @ self._vectors_HE.T
            near_QH[~self._agree([self._parts(one).literals for one in chunk], contained=False)] = 0.0
            for place, row_H in enumerate(near_QH):
                held, number = int(row_H.argmax()), whose[start + place]
                before = found[number]
                if row_H[held] >= max(self._meaning.cosine, before.similarity if before else 0.0):
                    found[number] = Leak(
                        asked=names[number], holdout=self._ids[held], similarity=min(float(row_H[held]), 0.999),
                        by_meaning=True,
                    )  # fmt: skip
        return found

    def _own_text(self, texts: Sequence[str]) -> str:
        """What is said apart from context; all of it where all is context."""
        return "\n".join([text for text in texts if text not in self._context] or texts)

    def _same(self, task: Task) -> str | None:
        return self._exact.get(_canonical(task.input)) if task.input else None

    def _parts(self, texts: Sequence[str]) -> "_Parts":
        """What is compared of a task or conversation; all is its own when all is context."""
        own = [text for text in texts if text not in self._context]
        shared = [text for text in texts if text in self._context]
        if not own:
            own, shared = shared, own
        return _Parts(_shingles(own), _shingles(shared), _literals(own))

    def _nearest(self, parts: Sequence["_Parts"], *, contained: bool) -> list[tuple[int, float]]:
        """(position of the nearest task of the holdout, its similarity), -1 and 0 for none."""
        import numpy as np

        if not self._ids:
            return [(-1, 0.0)] * len(parts)
        found: list[tuple[int, float]] = []
        for start in range(0, len(parts), _CHUNK):
            chunk = parts[start : start + _CHUNK]
            near_QH = self._own.similarity([part.own for part in chunk], contained=contained)
            # In a conversation context is not set apart, because its messages hold it within longer texts.
            contexts = [[*part.own, *part.shared] if contained else part.shared for part in chunk]
            near_QH = np.minimum(near_QH, self._shared.similarity(contexts, contained=contained, of_nothing=1.0))
            near_QH[~self._agree([part.literals for part in chunk], contained)] = 0.0
            best_Q = near_QH.argmax(axis=1)
            found += [(int(best), float(row_H[best])) for best, row_H in zip(best_Q, near_QH, strict=True)]
        return found

    def _agree(self, asked: Sequence[frozenset[str]], contained: bool) -> Any:
        """Whether the literals of each asked agree with those of each task of the holdout; shape (Q, H)."""
        import numpy as np

        kinds = {literals: number for number, literals in enumerate(dict.fromkeys(self._literals))}
        kind_H = np.array([kinds[literals] for literals in self._literals])
        rows = {
            one: np.array([kind <= one if contained else kind == one for kind in kinds], bool)[kind_H]
            for one in set(asked)
        }
        return np.stack([rows[one] for one in asked])


def refuse(leaks: Sequence[Leak], what: str) -> None:
    """Raise HoldoutError that names the first of `leaks`; nothing when there are none."""
    if not leaks:
        return
    named = "; ".join(map(str, leaks[:_NUM_NAMED]))
    more = f"; and {len(leaks) - _NUM_NAMED} more" if len(leaks) > _NUM_NAMED else ""
    raise HoldoutError(
        f"{len(leaks)} of the {what} would train on the holdout: {named}{more}. Take them out; or, if they are "
        "different tasks that only read alike, raise tasks.near (1 refuses equal ones only)"
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    own: Sequence[str]
    shared: Sequence[str]
    literals: frozenset[str]


class _Index:
    """Documents of the holdout as weighted sets of shingles."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}
        self._rows: list[list[int]] = []
        self._counts: Counter[int] = Counter()

    def add(self, shingles: Iterable[str]) -> None:
        row = [self._number.setdefault(shingle, len(self._number)) for shingle in shingles]
        self._rows.append(row)
        self._counts.update(row)

    def similarity(self, asked: Sequence[Sequence[str]], *, contained: bool, of_nothing: float = 0.0) -> Any:
        """Similarity of each asked set to each document; shape (Q, H). `of_nothing` where both are empty."""
        import numpy as np
        from scipy.sparse import csr_matrix

        total = len(self._rows)
        weights_S = np.array([_factor(text) * math.log1p(total / self._counts[s]) for text, s in self._number.items()])
        sizes_H = np.array([weights_S[row].sum() for row in self._rows])
        known = [[self._number[s] for s in one if s in self._number] for one in asked]
        # A shingle that no document has is as rare as can be.
        foreign_Q = [math.log1p(total) * sum(_factor(s) for s in one if s not in self._number) for one in asked]
        sizes_Q = np.array([weights_S[row].sum() for row in known]) + foreign_Q

        def matrix(rows: Sequence[Sequence[int]], weighted: bool) -> Any:
            columns = np.concatenate([np.asarray(row, np.int64) for row in rows]) if rows else np.zeros(0, np.int64)
            ends = np.cumsum([0, *map(len, rows)])
            values = weights_S[columns] if weighted else np.ones(len(columns))
            return csr_matrix((values, columns, ends), shape=(len(rows), max(1, len(self._number))))

        common_QH = (matrix(known, True) @ matrix(self._rows, False).T).toarray()
        whole_QH = sizes_H[None, :] + (0.0 if contained else sizes_Q[:, None] - common_QH) + np.zeros_like(common_QH)
        return np.where(whole_QH > 0, common_QH / np.maximum(whole_QH, 1e-12), of_nothing)


def _factor(shingle: str) -> float:
    return _PAIR if " " in shingle else 1.0


def _literals(texts: Sequence[str]) -> frozenset[str]:
    found = (match for text in texts for match in _LITERAL.finditer(text))
    return frozenset((match[1] or match[2] or match[0]).casefold() for match in found)


def _canonical(value: Mapping[str, Any]) -> str:
    """Equal for inputs that differ only in case, spacing and punctuation around words."""
    return to_json(_folded(value))


def _folded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _folded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_folded(item) for item in value]
    return " ".join(_words(value)) or value if isinstance(value, str) else value


def _texts(value: Any) -> list[str]:
    """Every text below `value`, numbers as text, in order of its keys."""
    if isinstance(value, Mapping):
        return [text for key in sorted(value, key=str) for text in _texts(value[key])]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _texts(item)]
    if value is None or isinstance(value, bool) or value == "":
        return []
    return [str(value)]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _shingles(texts: Sequence[str]) -> list[str]:
    """Distinct words and pairs of neighbours; a pair never spans two texts."""
    found: dict[str, None] = {}
    for text in texts:
        words = _words(text)
        found.update(dict.fromkeys(words))
        found.update(dict.fromkeys(f"{a} {b}" for a, b in pairwise(words)))
    return list(found)
