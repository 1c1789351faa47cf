"""The program around `harness.snapshots.callable`: one JSON object in, one JSON value out. Standard library only."""

import importlib.util
import json
import os
import sys
from pathlib import Path


def main(file: str, name: str) -> None:
    """Call the function; what it prints goes to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    sys.path.insert(0, str(Path(file).parent))
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    value = getattr(module, name)(request["task"], Path(request["workspace"]))
    out.write(json.dumps(value, allow_nan=False))
    out.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
