"""What the name of a model says: a path, or an id on the hub. No library of models is asked."""

from pathlib import Path


def is_path(name: str, folder: Path) -> bool:
    """Whether `name`, under which there is nothing in `folder`, can only be meant as a path.

    It starts or ends like one, has more parts than `owner/model`, or its first part is a folder there. Anything else
    may be an id on the hub.
    """
    if name.startswith(("/", ".", "~")) or name.lower().endswith(".gguf") or name.count("/") > 1:
        return True
    return "/" in name and (folder / name).parent.is_dir()
