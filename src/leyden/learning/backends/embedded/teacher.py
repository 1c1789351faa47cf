"""A model that is not trained and scores the tokens of another: the teacher of on-policy distillation.

Promises: log-probs of given ids at the temperature they were sampled with, by the same passes as the trainer's. It
reads the student's own ids, so both must have one tokenizer; another one is refused by name. It serves nothing.
"""

from leyden.base.config import LearnConfig, PolicyConfig
from leyden.base.errors import ModelUnusable
from leyden.base.records import FloatArray
from leyden.learning.backends.embedded.model import LoadedModel, load_model
from leyden.learning.backends.embedded.trainer import Trainer
from leyden.learning.batch import Batch


class EmbeddedTeacher:
    """A frozen model in this process."""

    def __init__(self, config: PolicyConfig, learn: LearnConfig, student: LoadedModel) -> None:
        """`config.model` is a path or hub id as it is. Raises ModelUnusable."""
        self.loaded = load_model(config.model, dtype=config.dtype, max_context=config.max_context)
        _check_vocabulary(self.loaded, student)
        # No optimizer state is made before the first step, and there is none.
        self._scorer = Trainer(self.loaded, learn)

    def logprobs(self, batch: Batch) -> FloatArray:
        """Log-prob of every label under this model, shape (N,)."""
        return self._scorer.logprobs(batch)


def _check_vocabulary(teacher: LoadedModel, student: LoadedModel) -> None:
    with teacher.tokenizer_lock, student.tokenizer_lock:
        theirs, ours = teacher.tokenizer.get_vocab(), student.tokenizer.get_vocab()
    differing = [token for token, number in ours.items() if theirs.get(token) != number]
    if differing:
        raise ModelUnusable(
            f"{teacher.source} cannot teach {student.source}: {len(differing)} of {len(ours)} tokens have other ids, "
            f"for example {differing[0]!r}; choose a teacher with the same tokenizer"
        )
