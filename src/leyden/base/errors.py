"""The one error tree. A message says what happened, with which value, and what to change.

    LeydenError
    +- ConfigError          a configuration file or an override cannot be used     (ValueError)
    +- TaskError            a task file cannot be used                             (ValueError)
    +- RecordError          a value does not fit the record it is meant for        (ValueError)
    +- StoreError           the store cannot do what was asked
    |  +- Conflict          a row with this key exists, or a transition is forbidden
    |  +- NotFound          no such row
    |  +- SchemaTooNew      the store was written by a newer Leyden
    |  +- StoreUnusable     locked, read-only, full, or not a store at all
    +- RequestRefused       a request to the gateway cannot be honoured exactly    (ValueError)
    +- EngineError          an engine or provider behind the gateway failed
    |  +- EngineUnreachable no connection, or it was closed before an answer
    |  +- EngineIncapable   it cannot return what is needed (token ids, log-probs, ...)
    |  +- ProviderError     a provider refused or failed; its `kind` names how
    +- HarnessError         the harness cannot be started at all                   (ValueError)
    +- VerifierError        a verifier raised, hung, or returned what is no reward
    +- ProbeError           a probe earned a reward that nothing like it may earn  (ValueError)
    +- LearningError        the learner cannot go on
    |  +- ModelUnusable     a model or tokenizer cannot be trained or served       (ValueError)
    |  +- ObjectiveError    the objective asked for does not hold for this data    (ValueError)
    |  +- CheckpointError   a checkpoint is missing, incomplete or of another run  (ValueError)
    +- HoldoutError         a rule that protects the holdout would be broken       (ValueError)
    +- Interrupted          the user or a budget asked to stop; everything durable is durable

What a user can cause is also a `ValueError`; what only we can cause is an `assert`.
"""


class LeydenError(Exception):
    """Base of every error that Leyden raises on purpose."""


class ConfigError(LeydenError, ValueError):
    """A configuration file or an override cannot be used."""


class TaskError(LeydenError, ValueError):
    """A task file cannot be used."""


class RecordError(LeydenError, ValueError):
    """A value does not fit the record it is meant for."""


class StoreError(LeydenError):
    """The store cannot do what was asked."""


class Conflict(StoreError):
    """A row with this key exists already, or a state transition is forbidden."""


class NotFound(StoreError):
    """No such row."""


class SchemaTooNew(StoreError):
    """The store was written by a newer Leyden; nothing was changed."""


class StoreUnusable(StoreError):
    """The store is locked, read-only, full, or not a store at all."""


class RequestRefused(LeydenError, ValueError):
    """A request to the gateway cannot be honoured exactly.

    `status` is the HTTP status, `field` the offending field if there is one, `hint` what to change.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        field: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.field = field
        self.hint = hint


class EngineError(LeydenError):
    """An engine or provider behind the gateway failed; `status` is what it answered, if it answered."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class EngineUnreachable(EngineError):
    """No connection to the engine, or it was closed before an answer."""


class EngineIncapable(EngineError):
    """The engine cannot return what is needed; the message names the engine and the flag."""


class ProviderError(EngineError):
    """A provider refused or failed.

    `kind` names how (docs/errors.md), `http_status` is what the client is told, `retry_after_s` how long the provider
    asks to be left alone, if it does.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str,
        http_status: int,
        status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, status=status)
        self.kind = kind
        self.http_status = http_status
        self.retry_after_s = retry_after_s


class HarnessError(LeydenError, ValueError):
    """The harness cannot be started at all: command missing, not executable, bad template."""


class VerifierError(LeydenError):
    """A verifier raised, hung, or returned what is no reward."""


class ProbeError(LeydenError, ValueError):
    """A probe earned a reward that nothing like it may earn; training would learn to do the same."""


class LearningError(LeydenError):
    """The learner cannot go on."""


class ModelUnusable(LearningError, ValueError):
    """A model or tokenizer cannot be trained or served."""


class ObjectiveError(LearningError, ValueError):
    """The objective asked for does not hold for this data or backend."""


class CheckpointError(LearningError, ValueError):
    """A checkpoint is missing, incomplete or of another run."""


class HoldoutError(LeydenError, ValueError):
    """A rule that protects the holdout would be broken."""


class Interrupted(LeydenError):
    """The user, or the budget that the user set, asked to stop. Everything durable stays so; `--resume` goes on."""
