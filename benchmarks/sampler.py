"""Tokens per second of the embedded sampler against transformers' own generation, on one model and prompt
length.

    python benchmarks/sampler.py --model PATH [--quick]

Every row: so many requests at once, each with a prompt of `--prompt-tokens` random ids and exactly
`--new-tokens` sampled ids (end tokens are switched off everywhere). "shared" means all prompts are equal, as
in a group of rollouts; "distinct" means no two are. transformers: `generate` on one batch, and
`generate_batch` (continuous batching) where this release can run it here. All in bfloat16 where the sampler
is. The best of `--repeats` counts, since the machine may be shared; the rows of all contestants are
interleaved. The last line is JSON.
"""

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from leyden.learning.backends.embedded.model import LoadedModel, load_model
from leyden.learning.backends.embedded.requests import Delta, SamplingRequest
from leyden.learning.backends.embedded.sampler import Sampler

WAIT_S = 300.0
"""Longest wait for one round of the sampler."""


def prompts(num: int, length: int, vocab_size: int, *, shared: bool) -> list[list[int]]:
    """Random prompts; the seed is fixed, so every contestant gets the same."""
    generator = torch.Generator().manual_seed(num)
    rows = torch.randint(3, vocab_size, (1 if shared else num, length), generator=generator).tolist()
    return rows * num if shared else rows


def run_sampler(sampler: Sampler, asked: Sequence[Sequence[int]], new_tokens: int) -> float:
    """Seconds until the last request has ended; nothing of an earlier round is reused."""
    sampler.prefixes.clear()
    left, done = [len(asked)], threading.Event()

    def sink(delta: Delta) -> None:
        if delta.error is not None:
            raise delta.error
        if delta.finish_reason is not None:
            left[0] -= 1
            if not left[0]:
                done.set()

    began = time.perf_counter()
    for i, ids in enumerate(asked):
        sampler.submit(SamplingRequest(prompt_ids=ids, max_tokens=new_tokens, seed=i), sink)
    if not done.wait(WAIT_S):
        raise TimeoutError(f"the sampler did not end {len(asked)} requests within {WAIT_S:.0f} s")
    return time.perf_counter() - began


def run_generate(model: Any, asked: Sequence[Sequence[int]], new_tokens: int) -> float:
    """Seconds of `generate` on one batch of equally long prompts."""
    ids_BT = torch.tensor(asked)
    began = time.perf_counter()
    with torch.no_grad():
        model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            do_sample=True,
            top_k=0,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
        )
    return time.perf_counter() - began


def run_continuous(model: Any, asked: Sequence[Sequence[int]], new_tokens: int) -> float:
    """Seconds of transformers' continuous batching."""
    from transformers import GenerationConfig

    config: Any = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=new_tokens, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
    )
    began = time.perf_counter()
    out = model.generate_batch([list(p) for p in asked], generation_config=config, progress_bar=False)
    if len(out) != len(asked):
        raise RuntimeError(f"continuous batching answered {len(out)} of {len(asked)} requests")
    return time.perf_counter() - began


def contestants(
    loaded: LoadedModel, sampler: Sampler, path: str, *, continuous: bool
) -> dict[str, Callable[[Sequence[Sequence[int]], int], float]]:
    """By name: seconds of one round."""
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if loaded.dtype == "bfloat16" else torch.float32

    def theirs(attention: str) -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention)
        return model.to(loaded.device).eval()

    plain = theirs("sdpa")
    all_of_them = {
        "leyden": lambda asked, new: run_sampler(sampler, asked, new),
        "generate": lambda asked, new: run_generate(plain, asked, new),
    }
    if continuous:
        paged = theirs("sdpa")
        all_of_them["continuous"] = lambda asked, new: run_continuous(paged, asked, new)
    return all_of_them


def main() -> None:
    """Measure, print a table, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder of a model")
    parser.add_argument("--quick", action="store_true", help="8 and 32 requests, few tokens, one repeat")
    parser.add_argument("--only-leyden", action="store_true", help="leave the others out")
    parser.add_argument("--no-continuous", action="store_true", help="leave continuous batching out")
    parser.add_argument("--requests", type=int, nargs="+", default=None)
    parser.add_argument("--prompt-tokens", type=int, default=150)
    parser.add_argument("--new-tokens", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    sizes = options.requests or ([8, 32] if options.quick else [1, 8, 32, 64])
    new_tokens = options.new_tokens or (16 if options.quick else 40)
    repeats = options.repeats or (1 if options.quick else 3)
    loaded = load_model(options.model, dtype=options.dtype, max_context=options.prompt_tokens + new_tokens + 8)
    loaded.eos_ids = ()
    sampler = Sampler(loaded)
    if options.only_leyden:
        rivals: dict[str, Any] = {"leyden": lambda asked, new: run_sampler(sampler, asked, new)}
    else:
        rivals = contestants(loaded, sampler, options.model, continuous=not options.no_continuous)
    rows, failed = [], {}
    warm_up = prompts(2, options.prompt_tokens, loaded.vocab_size, shared=False)
    for name, run in list(rivals.items()):
        try:
            run(warm_up, 4)
        except Exception as error:
            if name == "leyden":
                raise
            failed[name] = f"{type(error).__name__}: {str(error)[:200]}"
            del rivals[name]
    for num in sizes:
        for shared in (True, False):
            asked = prompts(num, options.prompt_tokens, loaded.vocab_size, shared=shared)
            times: dict[str, list[float]] = {name: [] for name in rivals}
            for _ in range(repeats):
                for name, run in rivals.items():
                    times[name].append(run(asked, new_tokens))
            rate = {name: round(num * new_tokens / min(t), 1) for name, t in times.items()}
            spread = {name: round(statistics.pstdev(t) / statistics.mean(t), 2) for name, t in times.items()}
            rows.append({"requests": num, "shared": shared, "tokens_per_s": rate, "spread": spread})
            print(f"{num:3d} requests, {'shared  ' if shared else 'distinct'}:", rate, flush=True)
    counters = sampler.counters
    sampler.close()
    largest = rows[-2]["tokens_per_s"]
    summary = {
        "rows": rows,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": new_tokens,
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "failed": failed,
        "prefill_share": round(counters.prefill_s / (counters.prefill_s + counters.decode_s), 3),
        "speedup_over_generate": round(largest["leyden"] / largest["generate"], 2) if "generate" in largest else None,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
