"""The peer: TRL's GRPOTrainer on the prompts of `benchmarks/vs_trl.py`. Runs in an environment of its own.

Reads one JSON object from standard input (model, prompts, group_size, max_tokens, steps, learning_rate); writes one
JSON object a step: seconds, mean reward.
"""

import json
import sys
import time
from typing import Any


def reward(text: str) -> float:
    """1 for nothing, 0 from 150 characters on: short answers are learned in a few steps."""
    return 1.0 - min(1.0, len(text) / 150)


def main() -> None:
    """Train and report."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    job: dict[str, Any] = json.load(sys.stdin)

    def score(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
        return [reward(completion[0]["content"]) for completion in completions]

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            if logs and "reward" in logs:
                row = {"seconds": time.perf_counter() - self.began, "reward": logs["reward"]}
                print(json.dumps(row), file=sys.__stdout__, flush=True)

    config = GRPOConfig(
        output_dir=job["folder"],
        per_device_train_batch_size=len(job["prompts"]) * job["group_size"],
        num_generations=job["group_size"],
        max_completion_length=job["max_tokens"],
        max_steps=job["steps"],
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        use_cpu=True,
        bf16=True,
        model_init_kwargs={"dtype": "bfloat16"},
        gradient_checkpointing=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in job["prompts"]]
    trainer = GRPOTrainer(
        model=job["model"], reward_funcs=score, args=config, train_dataset=Dataset.from_list(rows), callbacks=[Clock()]
    )
    sys.stdout = sys.stderr
    trainer.train()


if __name__ == "__main__":
    main()
