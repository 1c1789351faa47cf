"""What only a GPU can show: equal gradients above the size where FlexAttention begins, and the speed of its kernel.

    python benchmarks/gpu.py [--cpu]

Equality: gradients of every layout against padded rows in float32, two layers in the shapes of SmolLM2-135M, one group
below and one above the dense mask's limit. Kernels: forward and backward of one attention layer (9 heads, 3 of keys)
over a group's tree in bfloat16: FlexAttention, one dense mask, blocks of queries, and the packed rows that the tree
replaces. `--cpu` runs the same on small trees without FlexAttention, to see that this file works. The last line is one
JSON object.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import leyden.learning.backends.embedded  # noqa: F401 - before torch: it says how threads wait

# isort: split

import torch
from benchmarks import tree_update
from torch import Tensor, nn

from leyden.learning.backends.embedded import tree_attention
from leyden.learning.backends.embedded.attention import AttentionKernel
from leyden.learning.backends.embedded.kernels import kernel_for
from leyden.learning.backends.embedded.layouts import Pass, Tree, plan_passes

TOLERANCE = 1e-4
"""Relative difference of float32 gradients: sums run in another order in each kernel."""
MODULE = nn.Identity()


def equality(sizes: list[tuple[int, int, int]]) -> dict[str, float]:
    """Largest relative difference of gradients, by (rollouts, prompt, response)."""
    found = {}
    for num, prompt, response in sizes:
        batch = tree_update.to_batch(tree_update.group(tree_update.Texts(0), num, prompt, response))
        name = f"G={num} P={prompt} R={response}"
        found[name] = tree_update.difference(batch)
        print(f"  gradients of {name} differ by {found[name]:.1e}", flush=True)
    return found


def attention_s(kernel: AttentionKernel, num_tokens: int, device: torch.device) -> float:
    """Median seconds of forward and backward, after two runs that compile."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, num_tokens, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (9, 3, 3)
    )

    def once() -> None:
        out: Tensor = kernel(MODULE, q, k, v, 0.125, None)
        torch.autograd.grad(out.sum(), (q, k, v))

    times = [tree_update.timed(once)[0] for _ in range(12)]
    return statistics.median(times[2:])


def kernels(num: int, prompt: int, response: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of each way to compute a group's attention."""
    batch = tree_update.to_batch(tree_update.group(tree_update.Texts(0), num, prompt, response))
    budget = 10**9
    (tree,), (packed,) = plan_passes(batch, "tree", budget), plan_passes(batch, "packed", budget)
    rule = tree.rule
    assert isinstance(rule, Tree)
    ways: dict[str, Callable[[], AttentionKernel]] = {
        "dense mask": lambda: tree_attention._dense_kernel(rule, None, device),
        "blocks": lambda: tree_attention._blocked_kernel(tree_attention.plan_blocks(rule, device)),
        "packed rows": lambda: kernel_for(packed.rule, packed.ids_BT.shape, device),
    }
    if tree_attention.has_flex(device):
        ways = {"FlexAttention": lambda: tree_attention._flex_kernel(rule, None, device), **ways}

    def tokens(name: str) -> int:
        one: Pass = packed if name == "packed rows" else tree
        return one.num_tokens

    found = {name: 1e3 * attention_s(make(), tokens(name), device) for name, make in ways.items()}
    line = ", ".join(f"{name} {value:.2f}" for name, value in found.items())
    print(f"  attention of G={num} P={prompt} R={response} ({tree.num_tokens} tokens), ms a layer: {line}", flush=True)
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    """Print what was found; ends with 1 where gradients differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="small trees on a CPU")
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        sys.exit("no GPU here; --cpu runs small trees without one")
    device = torch.device("cpu" if options.cpu else "cuda")
    print(torch.cuda.get_device_name(0) if device.type == "cuda" else "CPU", flush=True)
    differences = equality([(4, 40, 12)] if options.cpu else [(8, 256, 64), (8, 1024, 256)])
    shapes = [(4, 100, 30)] if options.cpu else [(8, 256, 64), (8, 1024, 256), (8, 4096, 512)]
    times: dict[str, Any] = {f"G={g} P={p} R={r}": kernels(g, p, r, device) for g, p, r in shapes}
    worst = max(differences.values())
    print(json.dumps({"max_rel_grad_diff": worst, "differences": differences, "attention_ms": times}))
    if not worst < TOLERANCE:
        sys.exit(f"gradients differ by {worst:.1e}, more than {TOLERANCE:.0e}")


if __name__ == "__main__":
    main()
