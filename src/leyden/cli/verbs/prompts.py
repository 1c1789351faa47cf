"""`leyden prompts`: find the slots of a harness, look at versions, compare, export and serve them."""

import json
from collections.abc import Sequence
from pathlib import Path

import typer

from leyden.base.config import Config
from leyden.base.errors import ConfigError, LearningError, RequestRefused
from leyden.base.prompt_file import as_text, read_slots, write_slots
from leyden.base.prompts import Slot, slots_from_json, slots_to_json
from leyden.base.records import Call, PolicyVersion, RolloutState
from leyden.cli import wiring
from leyden.cli.verbs.options import DEFAULT_CONFIG, ConfigOption, JsonOption, SetOption, read_config
from leyden.gateway.dialects import BY_NAME, Body
from leyden.learning.algorithms.prompts.discovery import Discovery, Sighting, discover
from leyden.prompt_loop import diff_of, originals
from leyden.release import evaluation, gate, holdout
from leyden.store import ledger, selections
from leyden.store.base import Store
from leyden.traces.reader import Reader

HELP = (
    "Prompts that can be improved: ACTION is discover (write the file of slots from recorded calls), show [WHAT], "
    "diff WHAT [WHAT], export VERSION, or promote VERSION (serve it to calls that name none). WHAT is a version like "
    "main@7 or a file of slots."
)

ACTIONS = ("discover", "show", "diff", "export", "promote")
"""What the verb can do."""
NUM_WHAT = {"discover": (0, 0), "show": (0, 1), "diff": (1, 2), "export": (1, 1), "promote": (1, 1)}
"""Fewest and most things that an action is about."""


def command(
    action: str = typer.Argument(..., metavar="ACTION", help="discover, show, diff, export or promote."),
    what: list[str] = typer.Argument(None, metavar="[WHAT]", help="Versions (main@7) or files of slots."),
    config: ConfigOption = DEFAULT_CONFIG,
    override: SetOption = None,
    run: str = typer.Option("", "--run", metavar="RUN", help="discover: only rollouts of this run."),
    limit: int = typer.Option(500, "--limit", min=1, help="discover: at most so many rollouts."),
    out: Path = typer.Option(
        None, "--out", help="discover: file to write (default: prompts.slots). export: folder (default: here)."
    ),
    force: bool = typer.Option(
        False, "--force", help="discover: overwrite the file. promote: although no verdict says that it is better."
    ),
    json_output: JsonOption = False,
) -> None:
    """Print what was found, shown, written or promoted."""
    named = list(what or ())
    if action not in ACTIONS:
        raise ConfigError(f"there is no `leyden prompts {action}`; actions: {', '.join(ACTIONS)}")
    fewest, most = NUM_WHAT[action]
    if not fewest <= len(named) <= most:
        wanted = str(fewest) if fewest == most else f"{fewest} to {most}"
        raise ConfigError(f"`leyden prompts {action}` takes {wanted} versions or files, not {len(named)}")
    settings = read_config(config, override)
    if action == "discover":
        found, path = _discover(settings, run, limit, out, force)
        typer.echo(json.dumps(_as_json(found, path)) if json_output else _told(found, path))
    elif action == "show":
        slots = _slots(settings, named[0] if named else settings.prompts.slots)
        typer.echo(json.dumps(slots_to_json(slots)) if json_output else as_text(slots))
    elif action == "diff":
        shown = _diff(settings, named)
        typer.echo(json.dumps({"diff": shown}) if json_output else shown or "no difference")
    elif action == "export":
        written = _export(settings, named[0], out or Path("."))
        typer.echo(json.dumps([str(p) for p in written]) if json_output else f"Wrote {', '.join(map(str, written))}")
    else:
        sentence = _promote(settings, named[0], force)
        typer.echo(json.dumps({"serving": named[0], "evidence": sentence}) if json_output else sentence)


def _discover(settings: Config, run: str, limit: int, out: Path | None, force: bool) -> tuple[Discovery, Path]:
    path = out or settings.resolve(settings.prompts.slots)
    if path.exists() and not force:
        raise ConfigError(f"{path} exists and may have been edited; name another file with --out, or give --force")
    store = wiring.store_of(settings, create=False)
    try:
        over = (RolloutState.SUCCEEDED, RolloutState.FAILED)
        rollouts = store.read(lambda c: selections.select_by_state(c, over, limit, run or None))
        traces = Reader(store).traces([rollout.id for rollout in rollouts])
    finally:
        store.close()
    sightings = [
        Sighting(body=_engine_body(call), attempt=trace.attempt.id, input=trace.rollout.task.input)
        for trace in traces
        for call in trace.calls
        if call.policy == settings.learn.policy and call.status == "ok"
    ]
    if not sightings:
        raise ConfigError(
            f"no calls of policy {settings.learn.policy!r} are recorded in {len(traces)} finished rollouts"
            f"{f' of run {run}' if run else ''}; record some with `leyden run`"
        )
    found = discover(sightings)
    if not found.slots:
        raise ConfigError(
            f"{len(sightings)} calls have neither a system message nor a tool description that could be a slot "
            f"({'; '.join(found.left_out) or 'nothing was left out'}); write {path.name} by hand: a slot may also be a "
            'user message (where = "user") or a part of one'
        )
    write_slots(path, found.slots, found.notes)
    return found, path


def _engine_body(call: Call) -> Body:
    """A recorded request as its engine read it, but for the slots; as it came where its dialect refuses it today."""
    body = dict(call.request)
    dialect = BY_NAME.get(call.dialect)
    try:
        return dialect.engine_body(dialect.parse(body), {}, "") if dialect else body
    except RequestRefused:
        return body


def _as_json(found: Discovery, path: Path) -> dict[str, object]:
    return {
        "file": str(path),
        "slots": slots_to_json(found.slots),
        "notes": dict(found.notes),
        "left_out": list(found.left_out),
    }


def _told(found: Discovery, path: Path) -> str:
    lines = [f"Wrote {len(found.slots)} slots to {path}:"]
    for slot in found.slots:
        first = " ".join(slot.original.shown.split())
        lines.append(f"  {slot.name}: {first[:70]}{'...' if len(first) > 70 else ''}")
        lines.append(f"    {found.notes[slot.name]}")
    lines += [f"  left out: {why}" for why in found.left_out]
    return "\n".join([*lines, "Take out what is to stay as it is; then: leyden train"])


def _slots(settings: Config, what: str) -> tuple[Slot, ...]:
    """The slots of a version or a file."""
    if "@" in what and not Path(what).exists():
        store = wiring.store_of(settings, create=False)
        try:
            return slots_from_json(_version(store, what).prompts)
        finally:
            store.close()
    path = Path(what)
    return read_slots(path if path.exists() else settings.resolve(what))


def _version(store: Store, name: str) -> PolicyVersion:
    policy, _, _ = name.rpartition("@")
    versions = store.read(lambda connection: ledger.policy_versions(connection, policy))
    for version in versions:
        if version.name == name:
            if not version.prompts:
                raise ConfigError(f"{name} has no prompts of its own: it leaves those of the harness alone")
            return version
    known = ", ".join(v.name for v in versions if v.prompts) or "none"
    raise ConfigError(f"there is no policy version {name}; with prompts: {known}")


def _diff(settings: Config, named: Sequence[str]) -> str:
    """Against the harness's own texts, where only one is named."""
    after = _slots(settings, named[-1])
    before = _slots(settings, named[0]) if len(named) == 2 else originals(after)
    return diff_of(before, after, (named[0] if len(named) == 2 else "harness", named[-1]))


def _export(settings: Config, name: str, folder: Path) -> list[Path]:
    slots = _slots(settings, name)
    folder.mkdir(parents=True, exist_ok=True)
    base = Path(name).name.removesuffix(".toml")
    toml, text, diff = (folder / f"{base}.{ending}" for ending in ("toml", "txt", "diff"))
    write_slots(toml, slots)
    text.write_text(as_text(slots), encoding="utf-8")
    diff.write_text(diff_of(originals(slots), slots, ("harness", name)) + "\n", encoding="utf-8")
    return [toml, text, diff]


def _promote(settings: Config, name: str, force: bool) -> str:
    """Make a version the one that serves; what speaks for it."""
    store = wiring.store_of(settings, create=False)
    try:
        version = _version(store, name)
        answer, evidence = _evidence(settings, store, version)
        if answer != "better" and not force:
            raise LearningError(f"{name} was not shown to be better: {evidence}; give --force to serve it nevertheless")
        store.write(lambda c: ledger.set_serving(c, store, version.policy, version.version)).result(30)
        return f"{name} serves now. Evidence: {evidence}"
    finally:
        store.close()


def _evidence(settings: Config, store: Store, version: PolicyVersion) -> tuple[str, str]:
    """The verdict of the run that made it: its answer, and the same in words."""
    stored = store.read(lambda connection: ledger.evaluations(connection, run_id=version.run_id))
    by_label = {one.label: evaluation.Evaluation.from_json(one.result) for one in stored if one.split == "holdout"}
    final, base = by_label.get("final"), by_label.get("base")
    if final is None or base is None or final.policy_version != version.name:
        return "", f"run {version.run_id} has no holdout evaluation of it beside one of what it started from"
    seen = store.read(lambda connection: ledger.evaluations(connection, fingerprint=final.fingerprint))
    look = holdout.look_of(seen, version.run_id)
    verdict = gate.compare(final, base, level=holdout.level_at(look, settings.eval.level, settings.eval.looks))
    return verdict.answer, gate.explain(verdict)
