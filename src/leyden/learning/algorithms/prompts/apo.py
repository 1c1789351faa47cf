"""Automatic prompt optimisation: a critique of failures, edits that follow it, and a beam of the best.

Each round takes every prompt of the beam, runs the harness at a few training tasks, shows what failed to the reflection
model and asks for a critique, asks for edits that follow the critique, scores them on the validation tasks and keeps
the best `beam`. After Pryzant et al., "Automatic prompt optimization with gradient descent and beam search", arXiv
2305.03495; one critique and one edit may speak about several slots at once.

Promises: the templates are the configuration's; a reply that changes nothing, names no slot, loses a placeholder or
cannot be read is counted as garbage and never run; a prompt that solves its whole minibatch is left as it is.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from leyden.base.errors import ConfigError
from leyden.base.records import to_json
from leyden.learning.algorithms.prompts.base import (
    Arena,
    Candidate,
    Finalists,
    Scored,
    Trial,
    fill,
    read_text,
    score_seed,
)
from leyden.learning.order import shuffled

CRITIQUE_TEMPLATE = """\
An AI agent works with these prompts:

{prompts}

It failed in these examples:

{failures}

What is wrong with the prompts, or missing in them, that explains these failures? Give the few most likely reasons, each
in one or two sentences, as advice that would also help with other tasks of this kind. Do not solve the examples.
"""

EDIT_TEMPLATE = """\
An AI agent works with these prompts:

{prompts}

It failed in these examples:

{failures}

The reason is thought to be this:

{critique}

Write better prompts. Give the whole new text of each prompt that you change between the same tags, <slot name="NAME">
and </slot>, and nothing else. Keep words in single braces, like {this}, exactly as they are: they are filled in for
each task.
"""

_EDIT = re.compile(r'<slot name="([\w-]+)">\n?(.*?)</slot>', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Apo:
    """See the module."""

    name: str = "apo"
    """As the configuration calls it."""
    reflects: bool = True
    """Critiques and edits are written by another model."""

    async def search(self, arena: Arena, seed: Candidate) -> Scored:
        """The best prompts of all rounds."""
        finalists = Finalists([await score_seed(arena, seed)])
        for number in range(arena.settings.rounds):
            beam = finalists.best(arena.settings.beam)
            edits = [edit for one in beam for edit in await _edits(arena, one.candidate, number)]
            known = {one.candidate.id for one in finalists.found}
            fresh = list({edit.id: edit for edit in edits if edit.id not in known}.values())
            scored = (
                await arena.score(fresh, arena.val_tasks, f"round {number + 1}: {len(fresh)} edits") if fresh else []
            )
            if scored is None:
                break
            finalists.add(scored)
            await arena.report({"num_candidates": len(fresh), "score": finalists.best()[0].mean})
            if not fresh and all(one.mean >= 1 for one in beam):
                break
        return finalists.best()[0]


async def _edits(arena: Arena, candidate: Candidate, number: int) -> list[Candidate]:
    """New candidates made from one, guided by what it got wrong."""
    settings = arena.settings
    batch = shuffled(arena.train_tasks, lambda task: task.id, "minibatch", arena.seed, number)[: settings.minibatch]
    scored = await arena.score([candidate], batch, f"round {number + 1}: looking for failures")
    failures = [t for t in scored[0].trials if not t.solved and t.score is not None] if scored else []
    if not failures:
        return []
    found = []
    for k in range(settings.edits):
        shown = {"prompts": show_prompts(candidate), "failures": show_trials(failures, settings.show_answers)}
        critique = await arena.reflect(
            fill(settings.critique_template or CRITIQUE_TEMPLATE, number=str(k + 1), **shown)
        )
        if critique is None:
            break
        if not critique.strip():
            arena.garbage("an empty critique")
            continue
        reply = await arena.reflect(fill(settings.edit_template or EDIT_TEMPLATE, critique=critique.strip(), **shown))
        if reply is None:
            break
        edited = read_edit(arena, candidate, reply)
        if edited is not None:
            found.append(edited)
    return found


def read_edit(arena: Arena, candidate: Candidate, reply: str) -> Candidate | None:
    """The candidate that a reply asks for; None (and counted) if it asks for none."""
    slots = {slot.name: slot for slot in candidate.slots}
    blocks = dict(_EDIT.findall(reply))
    unknown = sorted(set(blocks) - set(slots))
    if not blocks or unknown:
        arena.garbage(f"a reply names the unknown slot {unknown[0]!r}" if unknown else "a reply without <slot> block")
        return None
    try:
        edited = candidate.with_texts({name: read_text(slots[name], text) for name, text in blocks.items()})
    except ConfigError as error:
        arena.garbage(str(error))
        return None
    if edited.id == candidate.id:
        arena.garbage("a reply that changes nothing")
        return None
    return edited


def show_prompts(candidate: Candidate) -> str:
    """Every slot in the form in which an edit gives it back."""
    return "\n".join(f'<slot name="{name}">\n{text}\n</slot>' for name, text in candidate.texts.items())


def show_trials(trials: Sequence[Trial], answers: bool) -> str:
    """What happened, for a reflection model."""
    return "\n\n".join(f"### Example {number}\n{show_trial(one, answers)}" for number, one in enumerate(trials, 1))


def show_trial(trial: Trial, answers: bool) -> str:
    """One task, what the model read and said, and what came of it."""
    lines = []
    for exchange in trial.exchanges[-3:]:  # the end of a long attempt says most about why it failed
        lines += [f"[{message['role']}] {message['content']}" for message in exchange.messages[-4:]]
        lines.append(f"[answer] {exchange.answer}")
    if not lines:
        lines.append(f"[task] {to_json(dict(trial.task.input))}")
    if answers and trial.task.answer is not None:
        lines.append(f"[expected] {to_json(trial.task.answer)}")
    return "\n".join([*lines, f"[result] {trial.feedback}"])
