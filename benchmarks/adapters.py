"""Tokens per second of several policies with an adapter each over one base, against peft's mixed batches.

    python benchmarks/adapters.py --model PATH [--policies 3] [--quick]

Every row: so many requests of each policy at once, each with a prompt of its own of `--prompt-tokens` random ids and
exactly `--new-tokens` sampled ids (end tokens are switched off everywhere). leyden: a sampler for each policy, which
meet in one pass. peft: one model with all adapters, `generate` on one batch with `adapter_names`, which is its way to
serve several at once. one_policy: as many requests, all of one policy, by the same sampler, which is what the meeting
costs. bfloat16. Rounds of the contestants are interleaved, and the best of `--repeats` counts. The last line is JSON.
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.sampler import WAIT_S, prompts  # noqa: E402 - the path is set above

from leyden.base.config import LoraConfig, PolicyConfig  # noqa: E402
from leyden.learning.backends.embedded.joint import Turn  # noqa: E402
from leyden.learning.backends.embedded.requests import Delta, SamplingRequest  # noqa: E402
from leyden.learning.backends.embedded.sampler import Sampler  # noqa: E402
from leyden.learning.backends.embedded.shared import load_together  # noqa: E402

RANK = 16
Asked = Sequence[Sequence[Sequence[int]]]
"""Prompts by policy."""


def run_samplers(samplers: Sequence[Sampler], asked: Asked, new_tokens: int) -> float:
    """Seconds until the last request has ended; nothing of an earlier round is reused."""
    left, done, lock = [sum(map(len, asked))], threading.Event(), threading.Lock()

    def sink(delta: Delta) -> None:
        if delta.error is not None:
            raise delta.error
        if delta.finish_reason is not None:
            with lock:
                left[0] -= 1
                if not left[0]:
                    done.set()

    for sampler in samplers:
        sampler.prefixes.clear()
    began = time.perf_counter()
    for sampler, of_one in zip(samplers, asked, strict=False):
        for i, ids in enumerate(of_one):
            sampler.submit(SamplingRequest(prompt_ids=ids, max_tokens=new_tokens, seed=i), sink)
    if not done.wait(WAIT_S):
        raise TimeoutError(f"the samplers did not end {left[0]} requests within {WAIT_S:.0f} s")
    return time.perf_counter() - began


def mixed_model(path: str, num: int) -> Any:
    """A model with `num` adapters, served by peft."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    base: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    config = PeftConfig(task_type="CAUSAL_LM", r=RANK, target_modules="all-linear")
    model: Any = get_peft_model(base, config, adapter_name="policy0")
    for i in range(1, num):
        model.add_adapter(f"policy{i}", config)
    return model.to(torch.bfloat16).eval()


def run_mixed(model: Any, asked: Asked, new_tokens: int) -> float:
    """Seconds of one mixed batch."""
    ids_BT = torch.tensor([ids for of_one in asked for ids in of_one])
    names = [f"policy{i}" for i, of_one in enumerate(asked) for _ in of_one]
    began = time.perf_counter()
    with torch.no_grad():
        model.generate(
            input_ids=ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            adapter_names=names,
            do_sample=True,
            top_k=0,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
        )
    return time.perf_counter() - began


def main() -> None:
    """Measure, print a table, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a model")
    parser.add_argument("--policies", type=int, default=3)
    parser.add_argument("--requests", type=int, nargs="+", default=None, help="of each policy")
    parser.add_argument("--prompt-tokens", type=int, default=150)
    parser.add_argument("--new-tokens", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--quick", action="store_true", help="few tokens, one repeat")
    options = parser.parse_args()
    sizes = options.requests or ([1, 8] if options.quick else [1, 8, 20])
    new_tokens = options.new_tokens or (16 if options.quick else 40)
    repeats = options.repeats or (1 if options.quick else 3)
    lora, context = LoraConfig(rank=RANK), options.prompt_tokens + new_tokens + 8
    policy = PolicyConfig(model=options.model, lora=lora, max_context=context, dtype="bfloat16")
    loaded = load_together({f"policy{i}": policy for i in range(options.policies)})
    turn, samplers = Turn(), []
    for one in loaded.values():
        one.eos_ids = ()
        samplers.append(Sampler(one, turn=turn))
    mixed = mixed_model(options.model, options.policies)
    rivals: dict[str, Callable[[Asked], float]] = {
        "leyden": lambda asked: run_samplers(samplers, asked, new_tokens),
        "one_policy": lambda asked: run_samplers(samplers, [[ids for of in asked for ids in of]], new_tokens),
        "peft": lambda asked: run_mixed(mixed, asked, new_tokens),
    }
    vocab_size = next(iter(loaded.values())).vocab_size
    rows = []
    for num in sizes:
        all_of_them = prompts(num * options.policies, options.prompt_tokens, vocab_size, shared=False)
        asked = [all_of_them[i * num : (i + 1) * num] for i in range(options.policies)]
        times: dict[str, list[float]] = {name: [] for name in rivals}
        for turn_no in range(repeats + 1):
            for name, run in rivals.items():
                seconds = run(asked)
                if turn_no:  # the first compiles kernels
                    times[name].append(seconds)
        rate = {name: round(num * options.policies * new_tokens / min(t), 1) for name, t in times.items()}
        rows.append({"requests_each": num, "tokens_per_s": rate, "ratio": round(rate["leyden"] / rate["peft"], 2)})
        print(f"{num:3d} requests of each of {options.policies}:", rate, flush=True)
    for sampler in samplers:
        sampler.close()
    print(json.dumps({"policies": options.policies, "rank": RANK, "new_tokens": new_tokens, "rows": rows}))


if __name__ == "__main__":
    main()
