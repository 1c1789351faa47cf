"""The embedded backend: one model in this process that is served by the sampler and moved by the trainer.

Promises: sampler and trainer share the parameters; an optimizer step runs only while nothing samples; after
it the engine answers to the new version's name only. Requests that wait during an update stay waiting and are
then refused if they asked for the old version, which the gateway never lets happen. If an update fails
between two of its steps, the weights are no version at all: nothing is served until `load` puts a version in
their place.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from leyden.base.config import LearnConfig, PolicyConfig
from leyden.base.errors import LearningError
from leyden.base.records import FloatArray
from leyden.learning.backends.base import Objective, UpdateReport
from leyden.learning.backends.embedded import checkpoint, memory
from leyden.learning.backends.embedded.chat import ChatFormat
from leyden.learning.backends.embedded.joint import Turn
from leyden.learning.backends.embedded.model import LoadedModel, load_model
from leyden.learning.backends.embedded.sampler import PREFIX_BYTES, Sampler
from leyden.learning.backends.embedded.server import EngineServer
from leyden.learning.backends.embedded.splice import Splicer
from leyden.learning.backends.embedded.tools import check_parser
from leyden.learning.backends.embedded.trainer import Trainer
from leyden.learning.batch import Batch


class EmbeddedBackend:
    """A `Backend` on this machine's CPU or one GPU. Raises ModelUnusable or ConfigError when it is made."""

    def __init__(
        self,
        policy: str,
        config: PolicyConfig,
        learn: LearnConfig,
        *,
        version: int = 0,
        seed: int = 0,
        drain_timeout_s: float = 60.0,
        max_active: int = 64,
        loaded: LoadedModel | None = None,
        turn: Turn | None = None,
        prefix_bytes: int = PREFIX_BYTES,
    ) -> None:
        """`config.model` and `config.chat_template` are paths as they are; `loaded` is used instead of
        loading one; backends that share the machine share a `turn`."""
        check_parser(config.tool_parser)
        self.policy = policy
        self.version = version
        self.drain_timeout_s = drain_timeout_s
        self.loaded = loaded or load_model(
            config.model,
            dtype=config.dtype,
            lora=config.lora,
            chat_template=Path(config.chat_template) if config.chat_template else None,
            max_context=config.max_context,
            seed=seed,
        )
        self.chat = ChatFormat(self.loaded)
        self.trainer = Trainer(self.loaded, learn) if config.trainable else None
        self.sampler = Sampler(
            self.loaded, version=version, seed=seed, max_active=max_active, prefix_bytes=prefix_bytes, turn=turn
        )
        self.server = EngineServer(
            policy,
            self.sampler,
            self.chat,
            tool_parser=config.tool_parser,
            default_max_tokens=config.sampling.max_tokens,
            splicer=Splicer(self.chat, config.tool_parser) if config.splice else None,
        )
        self._config = config
        self._seed = seed
        self._between_versions = False
        # One thread for all updates: glibc keeps freed memory per thread, and an update from each of six pool threads
        # kept 2.4 GB apiece on a 135M model.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"update-{policy}")
        self._closed = False

    @property
    def engine_key(self) -> str:
        """Bearer key that the engine wants."""
        return self.server.key

    @engine_key.setter
    def engine_key(self, key: str) -> None:
        self.server.key = key

    def start(self) -> str:
        """Begin to serve; the URL of the engine, without `/v1`."""
        return self.server.start()

    def encode_demo(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], int]:
        """See `ChatFormat.encode_demo`."""
        return self.chat.encode_demo(messages)

    def update(self, batches: Sequence[Batch], objective: Objective, version: int) -> UpdateReport:
        """One optimizer step per batch, in order; then the weights are `version` and are served as that.

        Raises LearningError (a loss that is not finite, a version that exists), ObjectiveError. Sequences
        that still run `drain_timeout_s` later are aborted.
        """
        trainer = self._require_trainer()
        if version <= self.version:
            raise LearningError(f"version {version} does not come after {self.version}; versions are never reused")
        if self._between_versions:
            raise LearningError("an earlier update failed between two steps; load a checkpoint before the next update")
        num_steps = trainer.num_steps
        with self._held():
            try:
                report = self._worker.submit(trainer.update, batches, objective).result()
            except BaseException:
                self._between_versions = trainer.num_steps != num_steps
                raise
            self._between_versions = True
            memory.give_back_if_scarce()
            self._serve(version)
        return report

    def logprobs(self, batch: Batch) -> FloatArray:
        """Trainer log-prob of every label under the current weights; shape (N,). Sampling goes on
        meanwhile."""
        return self._require_trainer().logprobs(batch)

    def values(self, batch: Batch) -> FloatArray:
        """What the critic expects from the prompt of each action on, shape (A,). Sampling goes on meanwhile."""
        return self._require_trainer().values(batch)

    def save(self, folder: Path, *, full: bool) -> None:
        """Write the weights with config and tokenizer; `full` adds optimizer and RNG states. Whole or not at
        all."""
        self._refuse_between("save")
        checkpoint.save(folder, self.loaded, self._require_trainer() if full else None)

    def load(self, folder: Path, version: int, *, full: bool) -> None:
        """Take the weights of `folder` (and, if `full`, everything else) and serve them as `version`."""
        trainer = self._require_trainer() if full else None
        with self._held():
            checkpoint.load(folder, self.loaded, trainer)
            self._between_versions = True
            self._serve(version)

    def load_base(self, version: int) -> None:
        """Take the weights that the policy started from, read again from where they came, and serve them as
        `version`."""
        fresh = load_model(
            self._config.model,
            dtype=self._config.dtype,
            lora=self._config.lora,
            chat_template=Path(self._config.chat_template) if self._config.chat_template else None,
            max_context=self._config.max_context,
            seed=self._seed,
        )
        weights = fresh.trainable()
        with self._held():
            with torch.no_grad():
                for name, parameter in self.loaded.trainable().items():
                    parameter.copy_(weights[name])
            self.loaded.refresh()
            self._serve(version)

    def serve_as(self, version: int) -> None:
        """Give the weights that are held the number under which the store knows them."""
        with self._held():
            self._serve(version)

    def forget_optimizer(self, folder: Path) -> None:
        """Reduce a full checkpoint to its weights: nothing resumes from it any more."""
        checkpoint.forget_state(folder)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._worker.shutdown()
        self.server.close()
        self.sampler.close()

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Nothing samples inside. If the block fails with the weights unchanged, the old version is served
        again."""
        self.sampler.pause(self.drain_timeout_s)
        try:
            yield
        except BaseException:
            if not self._between_versions:
                self.sampler.resume()
            raise

    def _serve(self, version: int) -> None:
        self.sampler.resume(version)
        self.version = version
        self._between_versions = False

    def _require_trainer(self) -> Trainer:
        if self.trainer is None:
            raise LearningError(f"policy {self.policy!r} is not trained; set policies.{self.policy}.trainable = true")
        return self.trainer

    def _refuse_between(self, what: str) -> None:
        if self._between_versions:
            raise LearningError(f"cannot {what}: an update failed between two steps, so these weights are no version")
