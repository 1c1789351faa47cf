"""Checkpoints: a folder that appears whole or not at all, and is verified before anything is read from it.

    config.json, model.safetensors, tokenizer*, chat_template.jinja     plain Hugging Face, or
    adapter_config.json, adapter_model.safetensors, tokenizer*          with LoRA: the update only
    trainer.safetensors         with a trainer: optimizer, reference, critic, random state
    leyden.json                 manifest: kind, base, number of steps, SHA-256 of every file

Nothing is pickled. After a `load` with a trainer a CPU continues with bit-identical losses. Not here: which
checkpoints to keep, data order, and the version of the policy; the loop has those.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from leyden.base.errors import CheckpointError
from leyden.learning.backends.embedded.atomic import atomic_folder
from leyden.learning.backends.embedded.model import LoadedModel, save_plain
from leyden.learning.backends.embedded.source import quiet
from leyden.learning.backends.embedded.trainer import Trainer

MANIFEST = "leyden.json"
FORMAT = 1
STATE = "trainer.safetensors"
_ADAM = ("exp_avg", "exp_avg_sq", "step")


def save(folder: Path, loaded: LoadedModel, trainer: Trainer | None = None) -> None:
    """Write the weights to `folder`; with a trainer, all that it needs to go on. Raises CheckpointError."""
    with atomic_folder(folder) as temporary:
        if loaded.lora is None:
            with loaded.tokenizer_lock:
                save_plain(loaded.causal, loaded.tokenizer, temporary)
        else:
            loaded.model.save_pretrained(str(temporary))  # type: ignore[operator]
            (temporary / "README.md").unlink(missing_ok=True)
            with loaded.tokenizer_lock:
                loaded.tokenizer.save_pretrained(temporary)
        if trainer is not None:
            save_file(_state(trainer), temporary / STATE)
        manifest = {
            "format": FORMAT,
            "kind": _kind(loaded),
            "base": loaded.source,
            "num_steps": None if trainer is None else trainer.num_steps,
            "sha256": {path.name: _sha256(path) for path in sorted(temporary.iterdir())},
        }
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def load(folder: Path, loaded: LoadedModel, trainer: Trainer | None = None) -> None:
    """Take the weights of `folder`; with a trainer, its optimizer, reference, random state and step count.

    Everything is read and compared before the first weight changes. Raises CheckpointError.
    """
    manifest = verify(folder)
    if manifest["kind"] != _kind(loaded):
        raise CheckpointError(
            f"{folder} holds {manifest['kind']}, but this run trains {_kind(loaded)}; "
            "set policies.NAME.lora as it was when the checkpoint was written"
        )
    if trainer is not None and manifest["num_steps"] is None:
        raise CheckpointError(f"{folder} holds weights only, without an optimizer; resume from a full checkpoint")
    weights = _read_weights(folder, loaded)
    state = None if trainer is None else _read_tensors(folder / STATE)
    _compare(folder, weights, loaded.trainable())
    if trainer is not None and state is not None:
        _restore(folder, trainer, state, int(manifest["num_steps"]))
    with torch.no_grad():
        for name, parameter in loaded.trainable().items():
            parameter.copy_(weights[name])
    loaded.refresh()


def forget_state(folder: Path) -> None:
    """Delete what only a resumed run needs (two thirds of the bytes); the weights stay a valid checkpoint."""
    path = folder / MANIFEST
    manifest = json.loads(path.read_text(encoding="utf-8"))
    if manifest["sha256"].pop(STATE, None) is None:
        return
    manifest["num_steps"] = None
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)  # first the promise, then the file: a crash between leaves an unused file
    (folder / STATE).unlink(missing_ok=True)


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all there and unchanged. Raises CheckpointError."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint of Leyden: there is no {MANIFEST} in it") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; use an earlier checkpoint") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else manifest
        raise CheckpointError(f"{path} has format {found!r}; this version reads format {FORMAT}")
    for name, expected in manifest["sha256"].items():
        try:
            found = _sha256(folder / name)
        except OSError as error:
            raise CheckpointError(f"{folder} lacks {name} ({error}); use an earlier checkpoint") from error
        if found != expected:
            raise CheckpointError(f"{folder / name} is not what was written (truncated?); use an earlier checkpoint")
    return manifest


def _kind(loaded: LoadedModel) -> str:
    return "full weights" if loaded.lora is None else f"a LoRA update of rank {loaded.lora.rank}"


def _state(trainer: Trainer) -> dict[str, Tensor]:
    """Optimizer, reference, critic and random state as flat named tensors."""
    tensors = {"random": torch.get_rng_state()}
    for name, parameter in _critic(trainer).items():
        tensors[f"value.{name}"] = parameter.detach().contiguous()
    for name, parameter in trainer.trained().items():
        for key in _ADAM:
            value = trainer.optimizer.state.get(parameter, {}).get(key)
            if value is not None:
                tensors[f"{key}.{name}"] = value.detach().contiguous()
    for name, value in (trainer.reference or {}).items():
        tensors[f"reference.{name}"] = value.contiguous()
    if trainer.loaded.device.type == "cuda":
        tensors["random_cuda"] = torch.cuda.get_rng_state(trainer.loaded.device)
    return tensors


def _restore(folder: Path, trainer: Trainer, state: Mapping[str, Tensor], num_steps: int) -> None:
    device = trainer.loaded.device
    known = {f"{key}.{name}" for key in _ADAM for name in trainer.trained()}
    known |= {f"reference.{name}" for name in trainer.parameters} | {f"value.{name}" for name in _critic(trainer)}
    unknown = sorted(set(state) - known - {"random", "random_cuda"})
    if unknown or "random" not in state:
        raise CheckpointError(f"{folder / STATE} is of another model: it holds {unknown[:3] or 'no random state'}")
    for key in ("exp_avg", "exp_avg_sq", "reference"):
        there = {n: state[f"{key}.{n}"] for n in trainer.trained() if f"{key}.{n}" in state}
        if there:
            _compare(folder, there, {n: p for n, p in trainer.trained().items() if n in there})
    _compare(folder, {n: state[f"value.{n}"] for n in _critic(trainer) if f"value.{n}" in state}, _critic(trainer))
    trainer.optimizer.state.clear()
    with torch.no_grad():
        for name, parameter in _critic(trainer).items():
            parameter.copy_(state[f"value.{name}"])
    for name, parameter in trainer.trained().items():
        kept = {key: state[f"{key}.{name}"].to(device) for key in _ADAM if f"{key}.{name}" in state}
        if kept:
            trainer.optimizer.state[parameter] = kept
    reference = {n: state[f"reference.{n}"].to(device) for n in trainer.parameters if f"reference.{n}" in state}
    trainer.reference = reference or None
    trainer.num_steps = num_steps
    torch.set_rng_state(state["random"])
    if "random_cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["random_cuda"], device)


def _critic(trainer: Trainer) -> dict[str, torch.nn.Parameter]:
    """Parameters of the value head, if there is one."""
    return {name: p for name, p in trainer.trained().items() if name not in trainer.parameters}


def _read_weights(folder: Path, loaded: LoadedModel) -> Mapping[str, Tensor]:
    """Trained parameters of a checkpoint under the names that they have in memory."""
    if loaded.lora is None:
        # Through transformers, which knows how names on disk and names in memory differ.
        try:
            with quiet():
                causal = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"the weights in {folder} cannot be read: {error}") from error
        return dict(causal.named_parameters())
    saved = _read_tensors(folder / "adapter_model.safetensors")
    # On disk, peft leaves out the name of the adapter, which is always `default` here.
    return {name: saved[short] for name in loaded.trainable() if (short := name.replace(".default", "")) in saved}


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; use an earlier checkpoint") from error


def _compare(folder: Path, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        if name not in found:
            raise CheckpointError(f"{folder} is of another model: it has no {name}")
        if found[name].shape != tensor.shape:
            raise CheckpointError(
                f"{folder} is of another model: {name} has shape {tuple(found[name].shape)}, not {tuple(tensor.shape)}"
            )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
