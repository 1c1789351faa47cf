"""What the sampler is asked and what it answers; no torch.

A request has one or more choices. Each choice gets deltas, the last of which has a finish reason or an error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from leyden.base.errors import LeydenError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """What is asked of the sampler."""

    prompt_ids: Sequence[int]
    """At least one id."""
    max_tokens: int
    """Most sampled tokens; the context may end a generation earlier."""
    temperature: float = 1.0
    """0 is greedy; its log-probs are those under temperature 1."""
    top_p: float = 1.0
    """See `draw`."""
    top_k: int = 0
    """See `draw`; 0 keeps all."""
    seed: int | None = None
    """Same seed, prompt and weights: same tokens. None takes the next of the sampler's own."""
    num_choices: int = 1
    """Independent samples of the same prompt; each has a stream of random numbers of its own."""
    stop: tuple[str, ...] = ()
    """Strings that end a generation; the text ends before them."""
    stop_ids: frozenset[int] = frozenset()
    """Ids that end a generation besides the model's own."""
    stream: bool = False
    """Deltas at every step; otherwise one per choice at its end."""
    version: int | None = None
    """Refused unless this version is served when sampling begins; None takes any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one choice gained."""

    choice: int
    """Index of the choice."""
    text: str = ""
    """Certain new text."""
    ids: Sequence[int] = ()
    """New sampled ids; the one that ended the generation included."""
    logprobs: Sequence[float] = ()
    """One per id."""
    finish_reason: str | None = None
    """`stop`, `length` or `abort` in the last delta."""
    stop_reason: str | int | None = None
    """The stop string or extra stop id that ended it; None for the model's own."""
    error: LeydenError | None = None
    """Instead of a finish reason: why there is none."""


Sink = Callable[[Delta], None]
"""Called in the sampler's thread; must return at once and not raise."""


class Ticket:
    """A request in the sampler."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        """Stop generating; the slots are free at the next step. From any thread, any number of times."""
        self.cancelled = True


@dataclass(slots=True)
class Counters:
    """What the sampler has done since it was made; read them for reports only."""

    num_prefill_tokens: int = 0
    """Prompt tokens computed."""
    num_reused_tokens: int = 0
    """Prompt tokens copied from earlier computation instead."""
    num_sampled_tokens: int = 0
    """Tokens drawn."""
    num_steps: int = 0
    """Decode passes."""
    num_aborted: int = 0
    """Sequences ended before their time."""
    prefill_s: float = 0.0
    """Time in prefill passes."""
    decode_s: float = 0.0
    """Time in decode passes, drawing and delivery included."""
