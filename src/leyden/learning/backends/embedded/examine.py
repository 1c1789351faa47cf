"""What can be known of a model before money is spent on training it: template, special tokens, tools, the gap.

Each function examines one thing and says what it saw; none of them changes the model. The gap is measured on real
samples of the engine that will serve, read back by the trainer that will train.
"""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from leyden.base.config import PolicyConfig
from leyden.base.errors import EngineError, ModelUnusable, RequestRefused
from leyden.base.findings import Finding, Level
from leyden.base.posting import post
from leyden.learning.backends.embedded.backend import EmbeddedBackend
from leyden.learning.backends.embedded.model import LoadedModel
from leyden.learning.backends.embedded.tools import parse
from leyden.learning.batch import Batch

TEMPERATURES = (0.5, 1.0, 1.5)
"""Around 1, where rollouts are sampled: a sampler that scales at the wrong place is off at one of them."""
NUM_SAMPLES, NUM_TOKENS = 4, 24
"""A hundred tokens show a systematic gap, and take a small model a second."""
GAP_LIMIT = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean |logp_trainer - logp_sampler| above which importance weights are far from 1 (exp(0.1) = 1.1)."""
BYTES_PER_TRAINED = {"weights": 4, "gradients": 4, "adam": 8}
"""float32 parameters, their gradients, and AdamW's two moments."""

_ASK, _SAY, _MORE = "Hi there.", "Sure.", "And then?"


def examine(backend: EmbeddedBackend, config: PolicyConfig, url: str) -> Iterator[Finding]:
    """Everything about the model behind `backend`, whose engine listens at `url`."""
    loaded = backend.loaded
    yield appending(backend)
    yield reasoning(backend)
    yield end_token(backend)
    yield begin_token(loaded)
    yield padding(loaded)
    yield tools(backend, config)
    yield from gap(backend, url)
    yield memory(backend)


def appending(backend: EmbeddedBackend) -> Finding:
    """Whether the next prompt begins with this prompt and this answer, token for token."""
    loaded, asked = backend.loaded, [{"role": "user", "content": _ASK}]
    first = backend.chat.encode(asked).ids
    seen = [*first, *loaded.encode(_SAY), loaded.eos_ids[0]]
    then = [*asked, {"role": "assistant", "content": _SAY}, {"role": "user", "content": _MORE}]
    try:
        second = backend.chat.encode(then).ids
    except RequestRefused as error:
        return Finding(
            name="template", level="problem", what=f"a conversation of two turns cannot be rendered: {error}",
            why="an agent of several turns would be refused", do="set policies.NAME.chat_template to one that can",
        )  # fmt: skip
    place = next((i for i, (a, b) in enumerate(zip(seen, second, strict=False)) if a != b), min(len(seen), len(second)))
    if place == len(seen):
        return Finding(name="template", level="ok", what="the prompt of a turn extends the turn before it exactly")
    return Finding(
        name="template", level="warning",
        what=f"the second prompt leaves the first turn at token {place} of {len(seen)}: "
        f"{loaded.decode(seen[place : place + 8])!r} was seen, "
        f"{loaded.decode(second[place : place + 8])!r} is read next",
        why="every turn is a trajectory of its own, so prompts are computed again and the tree saves less",
        do="use a template that only appends, by policies.NAME.chat_template",
    )  # fmt: skip


def reasoning(backend: EmbeddedBackend) -> Finding:
    """Whether earlier reasoning stays in the conversation."""
    try:
        strips = backend.chat.strips_reasoning()
    except RequestRefused as error:
        return Finding(name="reasoning", level="note", what=f"the template does not render it: {error}")
    if not strips:
        return Finding(name="reasoning", level="ok", what="the template keeps what earlier turns thought")
    return Finding(
        name="reasoning", level="warning", what="the template strips what earlier turns thought",
        why="the next prompt does not extend the turn that was sampled, so each turn is trained alone",
        do="nothing, if the model was made like this; else set policies.NAME.chat_template",
    )  # fmt: skip


def end_token(backend: EmbeddedBackend) -> Finding:
    """Whether a demonstration ends with the token that ends a generation."""
    turns = [{"role": "user", "content": _ASK}, {"role": "assistant", "content": _SAY}]
    try:
        ids, prompt_len = backend.encode_demo(turns)
    except (ModelUnusable, RequestRefused) as error:
        return Finding(
            name="end token", level="problem", what=str(error),
            why="a model that is not taught to stop writes until max_tokens",
            do="set policies.NAME.chat_template, or leave [sft] out",
        )  # fmt: skip
    shown = backend.loaded.decode(ids[prompt_len:])
    return Finding(name="end token", level="ok", what=f"an answer is trained with its end: {shown!r}")


def begin_token(loaded: LoadedModel) -> Finding:
    """Whether a prompt has the begin token once."""
    begin = loaded.tokenizer.bos_token_id
    ids = loaded.encode(loaded.render([{"role": "user", "content": _ASK}]))
    wanted = begin is not None and loaded.encode("x", special=True)[:1] == [begin]
    if begin is not None and ids[:2] == [begin, begin]:
        return Finding(
            name="begin token", level="problem", what=f"prompts begin with {loaded.decode([begin])!r} twice",
            why="the model never saw that in its training", do="take it out of the chat template",
        )  # fmt: skip
    if wanted and ids[:1] != [begin]:
        return Finding(
            name="begin token", level="warning",
            what=f"the tokenizer puts {loaded.decode([begin])!r} before a text, the chat template does not",
            why="a model that always saw it may be worse without", do="compare with the template of the model's card",
        )  # fmt: skip
    return Finding(name="begin token", level="ok", what="once, or not used by this model")


def padding(loaded: LoadedModel) -> Finding:
    """What pads, which is no fault here whatever it is: masks come from lengths."""
    pad, ends = loaded.tokenizer.pad_token_id, loaded.eos_ids
    if pad is None:
        return Finding(name="pad token", level="ok", what="the tokenizer has none; lengths say what is padding")
    same = " and also ends an answer; lengths, not ids, say what is padding" if pad in ends else ""
    return Finding(name="pad token", level="ok", what=f"{loaded.decode([pad])!r}{same}")


def tools(backend: EmbeddedBackend, config: PolicyConfig) -> Finding:
    """Whether a tool call that the template writes is read back as the same call."""
    call = {"id": "call_1", "type": "function", "function": {"name": "leyden_probe", "arguments": {"place": "Delft"}}}
    offer = {"type": "function", "function": {"name": "leyden_probe", "description": "probe",
                                              "parameters": {"type": "object", "properties": {}}}}  # fmt: skip
    asked = {"role": "user", "content": _ASK}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        before = backend.loaded.decode(backend.chat.encode([asked], [offer]).ids)
        answer = {"role": "tool", "content": "rain", "tool_call_id": "call_1"}
        whole = backend.loaded.decode(backend.chat.encode([asked, said, answer], [offer]).ids)
    except RequestRefused as error:
        return Finding(
            name="tools", level="warning", what=f"the template cannot render a tool call: {error}",
            why="an agent with tools would be refused", do="set policies.NAME.chat_template, or use no tools",
        )  # fmt: skip
    by = (
        "the template"
        if backend.chat.template_knows_tools
        else "Leyden, in the system message, for the template ignores them"
    )
    _, found, _ = parse(whole[len(before) :], config.tool_parser)
    if [(c.name, json.loads(c.arguments)) for c in found[:1]] == [("leyden_probe", {"place": "Delft"})]:
        return Finding(name="tools", level="ok", what=f"a call is written by {by} and read back as the same call")
    return Finding(
        name="tools", level="warning",
        what=f"a call is written by {by}, and the parser {config.tool_parser!r} does not read it back: "
        f"{whole[len(before) :][:120]!r}",
        why="calls of the model would stay text, and the agent's tools would never run",
        do="set policies.NAME.tool_parser to the style of this model, or policies.NAME.chat_template",
    )  # fmt: skip


def gap(backend: EmbeddedBackend, url: str) -> Iterator[Finding]:
    """Log-probabilities of the sampler against those of the trainer, at three temperatures; and both speeds."""
    limit = GAP_LIMIT[backend.loaded.dtype]
    num_sampled, sampling_s, training_s = 0, 0.0, 0.0
    worst: tuple[float, float] = (-1.0, 1.0)
    for temperature in TEMPERATURES:
        started = time.perf_counter()
        answer = _sample(backend, url, temperature)
        sampling_s += time.perf_counter() - started
        batch = _batch(answer, temperature)
        started = time.perf_counter()
        trainer_N = backend.logprobs(batch)
        training_s += time.perf_counter() - started
        num_sampled += batch.num_labels
        worst = max(worst, (float(np.abs(trainer_N - batch.logp_sampler_N).mean()), temperature))
    level: Level = "ok" if worst[0] <= limit else "problem"
    yield Finding(
        name="gap", level=level,
        what=f"sampler and trainer differ by {worst[0]:.1e} nats on average at temperature {worst[1]:g}, the worst of "
        f"{', '.join(f'{t:g}' for t in TEMPERATURES)} ({backend.loaded.dtype}: up to {limit:g})",
        why="" if level == "ok" else "RL would train another distribution than the one that was sampled",
        do="" if level == "ok" else 'set policies.NAME.dtype = "float32"; if it stays, report the model',
    )  # fmt: skip
    yield Finding(
        name="speed", level="ok",
        what=f"{num_sampled / sampling_s:.0f} sampled tokens a second with {NUM_SAMPLES} requests at once, "
        f"{num_sampled / training_s:.0f} read by the trainer",
    )  # fmt: skip


def memory(backend: EmbeddedBackend) -> Finding:
    """What the parameters and their training take."""
    total = sum(p.numel() for p in backend.loaded.model.parameters())
    trained = sum(p.numel() for p in backend.loaded.trainable().values())
    size = 4 * (total - trained) + trained * sum(BYTES_PER_TRAINED.values())
    if backend.loaded.dtype == "bfloat16":
        size += 2 * total  # the copy that is computed with
    return Finding(
        name="memory", level="ok",
        what=f"{total / 1e6:.3g} M parameters, {trained / 1e6:.3g} M of them trained: {size / 1e9:.1f} GB for weights, "
        "gradients and optimizer, and the activations of learn.token_budget tokens on top",
    )  # fmt: skip


def _sample(backend: EmbeddedBackend, url: str, temperature: float) -> dict[str, Any]:
    body = {
        "model": f"{backend.policy}@{backend.version}", "messages": [{"role": "user", "content": _ASK}],
        "n": NUM_SAMPLES, "max_tokens": NUM_TOKENS, "temperature": temperature, "seed": 1, "logprobs": True,
        "return_token_ids": True,
    }  # fmt: skip
    answer = post(f"{url}/v1/chat/completions", body, key=backend.engine_key, timeout_s=300)
    if answer.status != 200:
        raise EngineError(f"the embedded sampler at {url} sampled nothing: {answer}", status=answer.status)
    tree: dict[str, Any] = answer.tree()
    return tree


def _batch(answer: dict[str, Any], temperature: float) -> Batch:
    """The samples of one answer as labels of one step."""
    prompt: Sequence[int] = answer["prompt_token_ids"]
    choices = answer["choices"]
    ids = [choice["token_ids"] for choice in choices]
    logprobs = [entry["logprob"] for choice in choices for entry in choice["logprobs"]["content"]]
    lengths_A = np.asarray([len(one) for one in ids])
    num = int(lengths_A.sum())
    return Batch(
        sequences=[np.asarray([*prompt, *one], np.int32) for one in ids],
        prompt_len_A=np.full(len(ids), len(prompt), np.int32),
        rollout_A=np.arange(len(ids), dtype=np.int32),
        temperature_A=np.full(len(ids), temperature),
        action_N=np.repeat(np.arange(len(ids), dtype=np.int32), lengths_A),
        offset_N=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths_A]),
        token_N=np.concatenate([np.asarray(one, np.int32) for one in ids]),
        logp_sampler_N=np.asarray(logprobs),
        credit_N=np.zeros(num, np.float32),
        weight_N=np.full(num, 1.0 / num),
        num_rollouts=len(ids),
    )
