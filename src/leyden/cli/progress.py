"""What the loop says, for people (a bar with rate and estimate), for logs (a line now and then) or as JSON lines."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from leyden.step_report import MINOR_CREDIT

LOG_EVERY_S = 15.0
"""Without a terminal, a running phase is reported this often."""

MetricsSink = Callable[[Mapping[str, Any]], None]


def _quiet(row: Mapping[str, Any]) -> None:
    """The sink of nobody."""


def step_line(row: Mapping[str, Any]) -> str:
    """One line of text for a step report."""
    seconds = row.get("seconds", {})
    if row["stage"] == "sft":
        return f"imitation step {row['step'] + 1}: loss {row['loss']:.3f}"
    if row["stage"] == "prompts":
        return (
            f"round {row['step'] + 1}: best score {row['score']:.3f}, {row['num_versions']} prompts tried in "
            f"{row['num_rollouts']} rollouts, {row['num_reflections']} replies of the reflection model "
            f"({row['reflection_tokens']} tokens, {row['reflection_usd']:.2f} USD, {row['num_garbage']} of no use)"
        )
    reward = "none" if row["reward_mean"] is None else f"{row['reward_mean']:.3f}"
    if row["reward_low"] is not None and row["reward_high"] is not None:
        reward += f" [{row['reward_low']:.3f}, {row['reward_high']:.3f}]"
    success = "" if row["success"] is None else f", solved {100 * row['success']:.0f} %"
    return (
        f"step {row['step'] + 1}: reward {reward}{success}, {_learned(row)}, "
        f"{seconds.get('rollouts', 0):.1f} s running + {seconds.get('update', 0):.1f} s learning"
    )


def _learned(row: Mapping[str, Any]) -> str:
    """What the policy learned; each of them by name where there are several."""
    parts = row.get("policies")
    if parts:
        return "; ".join(f"{name}: {_learned(part)}" for name, part in parts.items())
    minor = row.get("minor_credit") or 0.0
    mostly_minor = f"{100 * minor:.0f} % of credit at equal success, " if minor > MINOR_CREDIT else ""
    return (
        f"{row['num_zero_variance']}/{row['num_groups']} groups all equal, {mostly_minor}"
        f"gradient norm {row['grad_norm']:.2f}, sampler-trainer gap {row['gap_mean']:.1e}"
    )


class TextProgress:
    """For people: a bar on a terminal, plain lines elsewhere."""

    def __init__(self, sink: MetricsSink = _quiet, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.sink = sink
        self._bar: RichProgress | None = None
        self._phase, self._total, self._began, self._logged = "", 0, 0.0, 0.0
        self._done, self._note = 0, ""

    def say(self, text: str) -> None:
        """One sentence."""
        self.console.print(text, markup=False, soft_wrap=True)

    def begin(self, phase: str, total: int) -> None:
        """A phase starts."""
        self.end(quiet=True)
        self._phase, self._total, self._done, self._note = phase, total, 0, ""
        self._began = self._logged = time.monotonic()
        if self.console.is_terminal:
            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=self.console,
                transient=True,
            )
            self._bar.add_task(phase, total=total, note="", rate="")
            self._bar.start()

    def advance(self, done: int, note: str = "") -> None:
        """`done` units are over."""
        self._done, self._note = done, note
        elapsed = time.monotonic() - self._began
        rate = f"{done / elapsed:.1f}/s" if done and elapsed > 0 else ""
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=done, note=note, rate=rate)
        elif time.monotonic() - self._logged > LOG_EVERY_S:
            self._logged = time.monotonic()
            left = f", about {elapsed / done * (self._total - done):.0f} s left" if done else ""
            self.say(f"  {self._phase}: {done}/{self._total} {rate} {note}{left}")

    def end(self, *, quiet: bool = False) -> None:
        """The phase is over."""
        if self._bar:
            self._bar.stop()
            self._bar = None
        if self._phase and not quiet and self._total > 1:
            took = time.monotonic() - self._began
            self.say(f"  {self._phase}: {self._done}/{self._total} in {took:.1f} s {self._note}".rstrip())
        self._phase = ""

    def metrics(self, row: Mapping[str, Any]) -> None:
        """The report of a step."""
        self.sink(row)
        if row["stage"] != "sft":
            self.say(step_line(row))

    def done(self, summary: Mapping[str, Any]) -> None:
        """Nothing: people were told the verdict and where the report is."""


class JsonProgress:
    """For programs: one JSON object a line on standard output."""

    def __init__(self, sink: MetricsSink = _quiet) -> None:
        self.sink = sink
        self._phase = ""

    def _print(self, **row: Any) -> None:
        print(json.dumps(row, default=str), file=sys.stdout, flush=True)

    def say(self, text: str) -> None:
        """One sentence."""
        self._print(event="say", text=text)

    def begin(self, phase: str, total: int) -> None:
        """A phase starts."""
        self._phase = phase
        self._print(event="begin", phase=phase, total=total)

    def advance(self, done: int, note: str = "") -> None:
        """Not reported: a program waits for `end`."""

    def end(self, *, quiet: bool = False) -> None:
        """The phase is over."""
        self._print(event="end", phase=self._phase)

    def metrics(self, row: Mapping[str, Any]) -> None:
        """The report of a step."""
        self.sink(row)
        self._print(event="step", **row)

    def done(self, summary: Mapping[str, Any]) -> None:
        """What the run came to: the last line."""
        self._print(event="done", **summary)
