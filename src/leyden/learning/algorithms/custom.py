"""An algorithm from a file of the user's: `learn.algorithm = "my_file.py:MyCredit"`.

The class is a subclass of `leyden.learning.algorithms.Algorithm`, is called with the `LearnConfig`, and names in
`settings` the algorithm-specific keys that it reads; a key that is set and not named there is refused, as for the
algorithms that have names. The file is imported into this process.
"""

import inspect
from pathlib import Path

from leyden.base import recipes
from leyden.base.command import load_named
from leyden.base.config import LearnConfig
from leyden.base.errors import ConfigError
from leyden.learning.algorithms.base import Algorithm


def load(config: LearnConfig, folder: Path) -> Algorithm:
    """The algorithm that `config.algorithm` names in a file below `folder`. Raises ConfigError."""
    file, _, name = config.algorithm.rpartition(":")
    path = (folder / file).absolute()
    where = f"learn.algorithm = {config.algorithm!r}"
    if not path.is_file():
        raise ConfigError(f"{where}: no file {path}; relative paths are read from {folder.absolute()}")
    try:
        made = load_named(str(path), name)  # which may raise anything, as may the constructor below
    except Exception as error:
        raise ConfigError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if not (inspect.isclass(made) and issubclass(made, Algorithm)):
        raise ConfigError(f"{where} is no subclass of leyden.learning.algorithms.Algorithm; derive it from that class")
    _check_keys(config, made, where)
    made.name = made.name or name
    try:
        algorithm: Algorithm = made(config)  # type: ignore[call-arg]
    except Exception as error:
        raise ConfigError(f"{where} cannot be made from a LearnConfig: {type(error).__name__}: {error}") from error
    return algorithm


def _check_keys(config: LearnConfig, made: type[Algorithm], where: str) -> None:
    if made.needs:
        raise ConfigError(f"{where} asks for {', '.join(sorted(made.needs))}; a critic or a teacher has a name only")
    foreign = sorted(made.settings - recipes.CUSTOM.keys)
    if foreign:
        raise ConfigError(
            f"{where} names settings that it cannot read: {', '.join(foreign)}; "
            f"possible: {', '.join(sorted(recipes.CUSTOM.keys))}"
        )
    if made.surrogate is not None and config.surrogate != LearnConfig.model_fields["surrogate"].get_default():
        raise ConfigError(f"learn.surrogate = {config.surrogate!r} would do nothing: {where} uses {made.surrogate}")
    # What the loop does with any algorithm that compares: shaping and refills need nothing of the class.
    read = made.settings | {"refills", "overlong_buffer", "overlong_penalty"}
    for key in sorted(recipes.CUSTOM.keys - read):
        if getattr(config, key) != LearnConfig.model_fields[key].get_default():
            raise ConfigError(
                f"learn.{key} = {getattr(config, key)!r} would do nothing: {made.__name__} does not name it in "
                "`settings`; leave it out, or name it there"
            )
