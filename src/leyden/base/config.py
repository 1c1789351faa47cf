"""The configuration: one frozen tree, TOML in, loaded without torch.

`load(path, overrides)` returns a `Config` from TOML, or from the JSON that `dump` wrote; an unknown key is an error
that names the nearest known key, a value of the wrong type is an error that names the key and the value. Overrides
have the form `learn.steps=20`; the part after `=` is read as TOML, and as a plain string where that fails. Paths are
relative to the file.
"""

import difflib
import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from leyden.base import recipes, renamed, several
from leyden.base.errors import ConfigError

EMBEDDED_KEY_ENV = "LEYDEN_ENGINE_KEY"
"""Variable in which the gateway process finds the key of the embedded sampler."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, use_attribute_docstrings=True)


class RunConfig(_Section):
    """`[run]`"""

    dir: str = "runs"
    """Folder in which each run gets a folder of its own."""
    seed: int = 0
    """Seed of the data order, of sampling and of initial weights of new parameters."""


class StoreConfig(_Section):
    """`[store]`"""

    url: str = "sqlite:///leyden.db"
    """Where everything is recorded. A relative path is relative to the configuration file."""
    synchronous: Literal["full", "normal"] = "normal"
    """`full` also survives a power cut, at one fsync per group commit; `normal` survives a killed process."""


class SqliteSnapshot(_Section):
    """`[harness.snapshots.sqlite.NAME]`"""

    path: str = ""
    """The database; a relative path is inside the workspace. May hold `{input.field}`."""
    query: str = ""
    """Read-only query whose rows are the state; order them, or list every column that tells rows apart."""


class PostgresSnapshot(_Section):
    """`[harness.snapshots.postgres.NAME]`"""

    url_env: str = ""
    """Environment variable with the connection string; needs the extra `postgres`."""
    query: str = ""
    """Query whose rows are the state; it runs in a read-only transaction."""


class SnapshotsConfig(_Section):
    """`[harness.snapshots]`: what is looked at before and after an attempt, beside the hashes of its files."""

    content: list[str] = []
    """Patterns of workspace files (`*.sql`, `out/*`) whose text is kept too, when it is small."""
    max_content_bytes: int = Field(4096, ge=1)
    """Larger files are kept as a hash only."""
    sqlite: dict[str, SqliteSnapshot] = {}
    """Rows of SQLite databases, by the name of the snapshot."""
    postgres: dict[str, PostgresSnapshot] = {}
    """Rows of PostgreSQL databases, by the name of the snapshot."""
    callable: str = ""
    """`file.py:function`, called with (task, workspace) in a process of its own; returns JSON."""
    max_rows: int = Field(1000, ge=1)
    """Rows kept per query; more are counted."""
    timeout_s: float = Field(10.0, gt=0)
    """Longest time of one query or call."""


class HarnessConfig(_Section):
    """`[harness]`"""

    command: str = ""
    """Command line of the agent; `{input.field}` is replaced by that field of the task, quoted."""
    callable: str = ""
    """Instead of a command: `file.py:function`, called with the task in a process of its own."""
    cwd: str = "."
    """Folder against which the command's relative paths are read; by default the configuration's folder."""
    timeout_s: float = Field(120.0, gt=0)
    """Time limit of one attempt; then the whole process group is ended."""
    concurrency: int = Field(8, ge=1)
    """Attempts that run at once."""
    env: dict[str, str] = {}
    """Environment variables; values may hold `{input.field}`."""
    workspace: str = ""
    """Template folder that is copied for each attempt; empty means an empty folder."""
    keep_workspaces: bool = False
    """Keep the folders of attempts, in `workspaces` below `run.dir`."""
    memory_bytes: int = Field(0, ge=0)
    """Limit on the address space of the harness; 0 is none."""
    output_bytes: int = Field(65536, ge=1024)
    """Captured tail of each of standard output and standard error."""
    preload: list[str] = []
    """Modules that a Python harness imports anyway: `python FILE ...` is then forked from a process that has
    imported them, which saves their import time per attempt. The harness itself is unchanged."""
    max_attempts: int = Field(3, ge=1)
    """Attempts of a rollout, the first included, when the outcome is retried."""
    snapshots: SnapshotsConfig = SnapshotsConfig()
    """State of the environment that is recorded before and after each attempt."""
    telemetry: bool = False
    """Let an agent that OpenTelemetry instruments send its traces to the gateway: sets the
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, _HEADERS and _PROTOCOL of its environment."""


class TasksConfig(_Section):
    """`[tasks]`"""

    train: str = ""
    """JSON Lines file of tasks to learn from."""
    val: str = ""
    """Tasks to watch during training."""
    holdout: str = ""
    """Tasks that are never trained on; the verdict is about them."""
    demos: str = ""
    """JSON Lines file of approved demonstrations, `{"task": ..., "messages": [...]}`; where several policies are
    trained, each with the `"policy"` that is to say such things."""
    near: float = Field(0.7, gt=0, le=1)
    """Similarity from which what is trained on counts as a task of the holdout; 1 refuses equal ones only."""
    near_model: str = ""
    """Folder of a sentence model (BERT type, mean pooling) that finds paraphrases which share few words; empty is
    none. The gateway, which loads no models, compares words only."""
    near_cosine: float = Field(0.7, gt=0, le=1)
    """With `near_model`: cosine from which two tasks whose numbers and quoted texts agree count as one."""


class LoraConfig(_Section):
    """`[policies.NAME.lora]`"""

    rank: int = Field(16, ge=1)
    """Rank of the update."""
    alpha: float = Field(32.0, gt=0)
    """Scale; the update is multiplied by alpha / rank."""
    targets: list[str] = []
    """Last parts of the names of linear layers or embeddings, for example `q_proj`; empty means every linear layer but
    the output."""


class SamplingConfig(_Section):
    """`[policies.NAME.sampling]`"""

    temperature: float = Field(1.0, ge=0)
    """0 is greedy, which cannot be trained on by RL."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Below 1 the sampled distribution is not the one trained; RL then refuses to start."""
    max_tokens: int = Field(256, ge=1)
    """Most tokens of one completion; a request that asks for less gets less."""


class EvalSamplingConfig(SamplingConfig):
    """`[policies.NAME.eval]`: as `sampling`, but greedy unless said otherwise."""

    temperature: float = Field(0.0, ge=0)
    """0 is greedy: the most likely token each time."""


class PriceConfig(_Section):
    """`[providers.NAME.usd_per_million]` and `[policies.NAME.usd_per_million]`: what a million tokens cost, in USD"""

    input: float = Field(0.0, ge=0)
    """Of prompt tokens."""
    output: float = Field(0.0, ge=0)
    """Of completion tokens."""
    cached: float | None = Field(None, ge=0)
    """Of prompt tokens that the provider read from its cache; absent means as `input`."""
    cache_write: float | None = Field(None, ge=0)
    """Of prompt tokens that it wrote into its cache; absent means as `input`."""

    def usd(self, num_prompt: int, num_completion: int, *, num_cached: int = 0, num_written: int = 0) -> float:
        """Of that many tokens; `num_prompt` includes those that were read from the cache and written into it."""
        fresh = max(0, num_prompt - num_cached - num_written)
        cached = self.input if self.cached is None else self.cached
        written = self.input if self.cache_write is None else self.cache_write
        millionths = fresh * self.input + num_cached * cached + num_written * written + num_completion * self.output
        return millionths / 1e6


class ProviderConfig(_Section):
    """`[providers.NAME]`"""

    kind: Literal["openai", "anthropic"] = "openai"
    """Its API: OpenAI's Chat Completions, which many providers have, or Anthropic's Messages."""
    base_url: str = ""
    """Where it is, up to and with `/v1` where it has that; empty means the official address of its kind."""
    key_env: str = ""
    """Environment variable that holds its key; empty sends none. One that is not set is an error at start-up."""
    timeout_s: float = Field(120.0, gt=0)
    """Longest wait for a whole answer."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """Kind `openai`: how it calls the limit of a completion; OpenAI's newer models know only the second."""
    usd_per_million: PriceConfig | None = None
    """Price of a million tokens of its models; absent is not known, which is not 0."""


class PolicyMatchConfig(_Section):
    """`[policies.NAME.match]`: which calls are this policy's, among those for a name of `match.models`."""

    system: str = ""
    """Regular expression that is found in the call's system and developer messages; empty is any."""
    tools: list[str] = []
    """Names of tools that the call offers, each of them; empty is any. With neither, no call is chosen."""


class PolicyConfig(_Section):
    """`[policies.NAME]`"""

    model: str = ""
    """Folder or hub id of a Hugging Face causal language model, a GGUF file, or a checkpoint; with `provider`, its id
    there."""
    provider: str = ""
    """Section of `providers` that answers instead of an engine; such a policy is recorded and never trained."""
    usd_per_million: PriceConfig | None = None
    """Price of a million tokens of this model: of your own engine, or where it is another than the provider's."""
    engine: str = ""
    """URL of an OpenAI-compatible engine that serves it; empty means the embedded sampler."""
    engine_kind: Literal["vllm", "sglang"] = "vllm"
    """How the engine returns token ids: as vLLM (the embedded sampler does the same), or as SGLang."""
    engine_key_env: str = ""
    """Environment variable that holds the engine's key."""
    engine_features: tuple[Literal["response_format", "images", "reasoning", "thinking_budget"], ...] = ()
    """What the engine can do that no probe tells; a request that needs anything else is a 400 that names it."""
    trainable: bool = True
    """False: recorded and served, never updated; a policy with a `provider` is never trainable."""
    lora: LoraConfig | None = None
    """Train a low-rank update instead of all weights."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the computation; parameters that are trained stay float32."""
    max_context: int = Field(2048, ge=8)
    """Prompt and completion together; a longer prompt is refused with a 400."""
    chat_template: str = ""
    """File of a chat template that replaces the tokenizer's own."""
    tool_parser: str = "hermes"
    """How tool calls are read from text: see `leyden.learning.backends.embedded.tools`."""
    splice: bool = False
    """True: the embedded sampler builds the next prompt of an attempt from the ids it served before plus the new
    messages, so that an append-only conversation never drifts; see docs/token-truth.md."""
    respect_harness: bool = False
    """True: the temperature and top_p that the harness sends are used instead of `sampling`."""
    sampling: SamplingConfig = SamplingConfig()
    """For rollouts that are trained on."""
    eval: EvalSamplingConfig = EvalSamplingConfig()
    """For evaluation."""
    learn: dict[str, Any] = {}
    """Keys of `[learn]` that differ for this policy (algorithm, learning_rate, ...), where several are trained; those
    about the rollouts and steps of the run belong into `[learn]`."""
    sft: dict[str, Any] = {}
    """Keys of `[sft]` that differ for this policy, where several imitate."""
    match: PolicyMatchConfig = PolicyMatchConfig()
    """Which calls are its own, where a harness asks for one name only; see `[match]`."""

    @model_validator(mode="before")
    @classmethod
    def _provided(cls, tree: Any) -> Any:
        if isinstance(tree, Mapping) and tree.get("provider") and "trainable" not in tree:
            return {**tree, "trainable": False}
        return tree


class WeightSchedule(_Section):
    """`[rewards.schedule.NAME]`: a weight that changes linearly between two steps. Evaluation uses `last`."""

    first: float = 0.0
    """Weight up to `from_step`."""
    last: float = 0.0
    """Weight from `to_step` on."""
    from_step: int = Field(0, ge=0)
    """Step (from 0) at which it begins to change."""
    to_step: int = Field(1, ge=1)
    """Step at which it has changed."""


class JudgeConfig(_Section):
    """`[rewards.judge]`: a model that scores, asked through the gateway."""

    policy: str = ""
    """Alias that the judge answers under, not the policy that is trained; empty means that there is no judge."""
    rubric: str = ""
    """Text file that says what is good; `{input.field}` and `{answer}` are filled in from the task."""
    source: str = "final_text"
    """What it reads: `final_text`, `stdout`, or `file:NAME` in the workspace."""
    component: str = "judge"
    """Name of the component that it gives."""
    low: float = 0.0
    """Lowest score that the rubric allows."""
    high: float = 1.0
    """Highest score that the rubric allows; scores are recorded as given."""
    max_tokens: int = Field(256, ge=16)
    """Of the judge's answer."""
    timeout_s: float = Field(60.0, gt=0)
    """Longest wait for one answer."""
    max_chars: int = Field(20_000, ge=100)
    """A longer answer of the agent is cut in the middle, and the judge is told."""


class RewardsConfig(_Section):
    """`[rewards]`"""

    verifier: str = ""
    """`file.py:function`, a command that reads one JSON object and prints one, or `builtin:NAME`, several joined
    by `+` (docs/rewards.md lists them)."""
    settings: dict[str, dict[str, Any]] = {}
    """Settings of built-in verifiers, by name: `[rewards.settings.exact]`."""
    weights: dict[str, float] = {}
    """Component to weight; empty means weight 1 for a single component."""
    schedule: dict[str, WeightSchedule] = {}
    """Component to a weight that changes over the steps; such a component is not in `weights`."""
    gates: dict[str, str] = {}
    """Component to the component that must be above 0 for it to count."""
    clip: dict[str, tuple[float, float]] = {}
    """Component to its allowed range; applied before the weight."""
    success: str = ""
    """Component that says whether a task is solved (above 0.5); empty means the total."""
    timeout_s: float = Field(30.0, gt=0)
    """Time limit of one verification."""
    from_agent: bool = False
    """Whether an attempt's own key may post rewards."""
    on_failure: dict[str, Literal["train", "zero", "retry", "exclude"]] = {}
    """Outcome to policy; replaces the defaults of `leyden.runner.outcome`."""
    judge: JudgeConfig = JudgeConfig()
    """A model that scores; its component joins those of the verifier."""
    canary_verifier: str = ""
    """A second verifier that nothing is trained on, written as `verifier` is; it returns one number, 1 for solved
    and 0 for not. A growing gap to the first one is the mark of a reward that is being fooled."""
    canary_share: float = Field(0.25, gt=0, le=1)
    """Share of the training tasks, chosen by the hash of their id, that it looks at."""
    canary_baseline: int = Field(5, ge=2)
    """Steps of a run whose mean gap is taken as normal."""
    canary_drift: float = Field(0.5, gt=0)
    """Standard errors by which a step may exceed the normal gap before it counts."""
    canary_limit: float = Field(5.0, gt=0)
    """Alarm when the excesses have summed up to so many standard errors (CUSUM)."""


class ProbesConfig(_Section):
    """`[probes]`"""

    before_training: bool = True
    """Run the cheap probes before `leyden train`, which refuses when one wins."""
    tasks: int = Field(4, ge=1)
    """Training tasks that each probe is run at; before training at most two."""
    bound: float = Field(0.2, ge=0, le=1)
    """A probe wins when its share of solved tasks, or of the highest reward, is above this."""
    bounds: dict[str, float] = {}
    """The same for single probes, by name; 1 lets everything pass."""
    skip: list[str] = []
    """Probes that are not run."""
    files: list[str] = []
    """Python files with probes of your own (docs/probes.md)."""
    timeout_s: float = Field(300.0, gt=0)
    """Longest time of all probes together; what is not over then is reported as not judged."""


class SftConfig(_Section):
    """`[sft]`"""

    epochs: int = Field(2, ge=1)
    """Passes over the demonstrations."""
    batch_size: int = Field(8, ge=1)
    """Demonstrations per optimizer step."""
    learning_rate: float = Field(1e-5, gt=0)
    """Peak of the schedule."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate."""
    warmup_steps: int = Field(0, ge=0)
    """Linear warm-up."""


class LearnConfig(_Section):
    """`[learn]`"""

    policy: str = "main"
    """Which policy is trained; every other one that has a model of its own and is trainable is trained beside it. Left
    out where there is no `[policies.main]`, it is the first of them."""
    algorithm: str = "grpo"
    """Who gets credit: a name of docs/learning.md, or `file.py:Class` for one of your own; `bootstrap_demos`, `apo` and
    `gepa` improve prompts instead of weights (docs/prompts.md)."""
    group_size: int = Field(8, ge=1)
    """Rollouts of one task that are compared."""
    tasks_per_step: int = Field(8, ge=1)
    """Groups per step."""
    steps: int = Field(50, ge=0)
    """Optimizer rounds; 0 skips reinforcement learning."""
    normalisation: Literal["rollout_mean", "token_mean", "call_mean", "constant"] = "rollout_mean"
    """How token losses become one number (docs/learning.md)."""
    constant_tokens: int = Field(256, ge=1)
    """Divisor per rollout of `constant`."""
    surrogate: Literal["policy_gradient", "ppo_clip", "cispo", "gspo"] = "policy_gradient"
    """Loss per token (docs/learning.md)."""
    clip_low: float = Field(0.2, gt=0)
    """The ratio's lower bound is 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio's upper bound is 1 + clip_high."""
    clip_dual: float = Field(0.0, ge=0)
    """`ppo_clip`: bound above 1 of the ratio where credit is negative; 0 is none."""
    old_logprobs: Literal["recomputed", "recorded"] = "recomputed"
    """Ratios are taken against the trainer's own log-probs before the step, or against those of the sampler."""
    importance_cap: float = Field(2.0, ge=0)
    """Cap of the weight exp(logp_trainer - logp_sampler); 0 turns the correction off."""
    importance_level: Literal["token", "sequence"] = "token"
    """Importance weights and masks by token, or by call (the product over its tokens)."""
    importance_mask: float = Field(0.0, ge=0)
    """Tokens whose importance ratio is above this or below its inverse are dropped (`off_policy`); 0 drops none."""
    kl: float = Field(0.0, ge=0)
    """Weight of the k3 estimate of the divergence from the starting policy."""
    entropy: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    epochs: int = Field(1, ge=1)
    """Passes over a step's rollouts."""
    mini_batches: int = Field(1, ge=1)
    """Optimizer steps per pass; a rollout stays in one of them."""
    min_reward: float = 0.5
    """`rejection_sft`: rollouts at or above are trained."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount from one call of a rollout to the next."""
    step_reward_weight: float = 1.0
    """Weight of the rewards of single calls beside the reward of the rollout."""
    state: Literal["prompt", "observation"] = "prompt"
    """`step_group`: calls are compared if their whole prompts are equal, or what was new in them."""
    state_weight: float = Field(1.0, ge=0)
    """`step_group`: weight of the comparison of calls beside that of rollouts."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """`ppo`: 0 trusts the critic, 1 the returns."""
    value_coef: float = Field(0.1, ge=0)
    """`ppo`: weight of the critic's loss, whose gradient also reaches the model below the value head."""
    value_clip: float = Field(0.2, ge=0)
    """`ppo`: farthest useful move of a value in one step; 0 is no bound."""
    value_learning_rate: float = Field(1e-3, gt=0)
    """`ppo`: of the value head, which begins at 0."""
    dpo_beta: float = Field(0.1, gt=0)
    """`dpo`: larger keeps closer to the reference."""
    teacher: str = ""
    """`distill`: policy (not trained, with a model) whose log-probs are learned from."""
    max_staleness: int = Field(0, ge=0)
    """Versions that a rollout may be behind when it is learned from; 0 waits for all rollouts of each step, above it
    rollouts of later steps go on during an update."""
    refills: int = Field(0, ge=0)
    """Times that groups without a difference are replaced by groups of further tasks; above 0 they are dropped."""
    overlong_buffer: float = Field(0.0, ge=0, le=1)
    """Last share of `sampling.max_tokens` in which longer completions lose reward linearly; 0 is off."""
    overlong_penalty: float = Field(1.0, gt=0)
    """Reward lost at `sampling.max_tokens`."""
    learning_rate: float = Field(5e-6, gt=0)
    """Peak of the schedule."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate."""
    warmup_steps: int = Field(0, ge=0)
    """Linear warm-up."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's."""
    grad_clip: float = Field(1.0, ge=0)
    """Largest gradient norm; 0 is none."""
    layout: Literal["tree", "depth_first", "packed", "padded", "single", "auto"] = "tree"
    """How trajectories are laid out for the update; the gradient is the same. `depth_first` is the tree in the memory
    of one path. `auto` takes the fastest by measured time, so two runs may differ in the last bits."""
    token_budget: int = Field(4096, ge=16)
    """Most tokens of one forward pass; gradients are accumulated over passes."""
    activation_checkpointing: bool = False
    """True: each layer keeps its input only and is computed again in the backward: less memory, about a third more
    time, the same gradient."""
    overlong: Literal["drop", "window"] = "drop"
    """Calls longer than `max_sequence_tokens`: `drop` leaves them out; `window` trains their end with a context cut on
    the left, which is not what the sampler read: see docs/token-truth.md."""
    max_sequence_tokens: int = Field(0, ge=0)
    """Longest prompt and completion that are trained; 0 means the policy's `max_context`."""
    eval_every: int = Field(0, ge=0)
    """Evaluate on `val` every so many steps; 0 never."""
    checkpoint_every: int = Field(5, ge=1)
    """Save everything that `--resume` needs every so many steps."""
    keep_checkpoints: int = Field(2, ge=1)
    """Older ones are deleted, except versions that were evaluated."""
    step_timeout_s: float = Field(1800.0, gt=0)
    """Longest wait for the rollouts of one step."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        return recipes.fill(values) if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _check(self) -> "LearnConfig":
        defaults = {name: part.get_default() for name, part in type(self).model_fields.items()}
        wrong = recipes.check(self.model_dump(), defaults)
        if wrong:
            raise ValueError("\n  ".join(wrong))
        return self

    @property
    def improves_prompts(self) -> bool:
        """Whether the algorithm improves prompts and not weights."""
        return self.algorithm in recipes.PROMPT_ALGORITHMS


class PromptsConfig(_Section):
    """`[prompts]`"""

    slots: str = "prompts.toml"
    """File of slots, as `leyden prompts discover` writes it."""
    metric: Literal["success", "reward"] = "success"
    """What candidates are compared by: the share of solved tasks, or the mean reward (a failed agent without one counts
    0)."""
    samples: int = Field(1, ge=1)
    """Rollouts per task and candidate."""
    max_rollouts: int = Field(2000, ge=1)
    """Budget: most rollouts of the search. Holdout evaluations do not count."""
    demo_slot: str = ""
    """`bootstrap_demos`: slot to whose text demonstrations are appended; empty is the first that is a message."""
    demo_template: str = "Example:\n{input}\nAnswer:\n{output}"
    """`bootstrap_demos`: text of one demonstration."""
    min_demos: int = Field(1, ge=1)
    """`bootstrap_demos`: fewest demonstrations of a candidate."""
    max_demos: int = Field(4, ge=1)
    """`bootstrap_demos`: most demonstrations of a candidate."""
    max_demo_chars: int = Field(2000, ge=1)
    """`bootstrap_demos`: a longer demonstration is not used."""
    bootstrap_samples: int = Field(1, ge=1)
    """`bootstrap_demos`: sampled rollouts per training task from which demonstrations are taken."""
    candidates: int = Field(8, ge=1)
    """`bootstrap_demos`: sets of demonstrations that are tried."""
    search: Literal["halving", "random"] = "halving"
    """`bootstrap_demos`: `halving` drops the worse half after each rung of tasks, `random` tries all on all."""
    first_rung: int = Field(8, ge=1)
    """`bootstrap_demos`: validation tasks of the first rung of `halving`; each further rung has twice as many."""
    rounds: int = Field(3, ge=1)
    """`apo`: rounds of critique, edit and selection."""
    beam: int = Field(2, ge=1)
    """`apo`: prompts that go on to the next round."""
    edits: int = Field(2, ge=1)
    """`apo`: edits asked for per prompt and round."""
    minibatch: int = Field(4, ge=1)
    """`apo`, `gepa`: training tasks whose rollouts are shown to the reflection model at once."""
    show_answers: bool = True
    """`apo`, `gepa`: whether the reflection model sees the answers of training tasks."""
    critique_template: str = ""
    """`apo`: what asks for a critique, with `{prompts}`, `{failures}` and perhaps `{number}`; empty is Leyden's own."""
    edit_template: str = ""
    """`apo`: what asks for an edit, with `{prompts}`, `{critique}` and perhaps `{failures}`; empty is Leyden's own."""
    gepa_template: str = ""
    """`gepa`: template of the library with `<curr_param>` and `<side_info>`; empty is the library's own."""
    reflection: str = ""
    """Reflection model: an alias that the gateway serves (a policy of this file with a provider or an engine); its
    calls are recorded, and its `usd_per_million` is what it costs."""
    reflection_max_tokens: int = Field(2048, ge=1)
    """Most tokens of one reply."""
    reflection_temperature: float = Field(1.0, ge=0)
    """Of the reflection model; above 0, so that the same question gives different edits."""
    reflection_timeout_s: float = Field(120.0, gt=0)
    """Longest wait for one reply."""
    reflection_tries: int = Field(4, ge=1)
    """Times that a question is asked when the model does not answer; then the run stops and can be resumed."""
    reflection_backoff_s: float = Field(1.0, ge=0)
    """Pause after the first such try; each further one is twice as long."""
    max_reflections: int = Field(100, ge=1)
    """Budget: most replies of the reflection model."""
    max_reflection_tokens: int = Field(2_000_000, ge=1)
    """Budget: most tokens of its prompts and replies."""
    max_reflection_usd: float | None = Field(None, gt=0)
    """Budget: most money for it; needs the price of its alias. Absent is no limit."""
    max_garbage: int = Field(20, ge=1)
    """Replies of no use after which the search stops: the model does not understand the task."""

    @model_validator(mode="after")
    def _check(self) -> "PromptsConfig":
        if self.min_demos > self.max_demos:
            raise ValueError(
                f"prompts.min_demos is {self.min_demos} and prompts.max_demos {self.max_demos}; raise the latter"
            )
        for key, needed in (
            ("demo_template", ("{input}", "{output}")),
            ("critique_template", ("{prompts}", "{failures}")),
            ("edit_template", ("{prompts}", "{critique}")),
            ("gepa_template", ("<curr_param>", "<side_info>")),
        ):
            for name in needed:
                text: str = getattr(self, key)
                if text and name not in text:
                    raise ValueError(f"prompts.{key} lacks {name}, which says where that text goes; add it")
        return self


class EvalConfig(_Section):
    """`[eval]`"""

    samples: int = Field(1, ge=1)
    """Rollouts per task."""
    max_tasks: int = Field(0, ge=0)
    """Use the first so many tasks of the split; 0 is all."""
    resamples: int = Field(10000, ge=100)
    """Of the bootstrap."""
    level: float = Field(0.95, gt=0, lt=1)
    """Of every interval; 1 - level is the chance of a false claim, over all looks at the holdout together."""
    looks: int = Field(0, ge=0)
    """Looks at the holdout that are planned: each spends an equal part of 1 - level, and later ones can claim
    nothing. 0 is no plan: look k spends (1 - level) / (k (k + 1))."""
    safety: str = ""
    """Reward component that says whether a rollout was safe (at most 0.5 is a violation); empty counts none."""


class BudgetConfig(_Section):
    """`[budget]`"""

    tokens: int | None = None
    """Tokens that the run's calls may read and sample; absent is no limit."""
    minutes: float | None = None
    """Minutes of recorded work of the run; absent is no limit."""
    usd: float | None = None
    """Money for calls by their prices, and for the machine (`costs.machine_usd_per_hour`); absent is no limit."""


class CostsConfig(_Section):
    """`[costs]`: what is not the price of tokens, which stands with each policy and provider"""

    machine_usd_per_hour: float = Field(0.0, ge=0)
    """Price of this machine; training time becomes money with it."""
    calls_per_month: int = Field(0, ge=0)
    """Workload for the monthly projection of `leyden compare`, in model calls of the first version compared."""


class MatchConfig(_Section):
    """`[match]`: harnesses that send one model name for several policies."""

    models: list[str] = []
    """Names that stand for no single policy: the system message and the tools of a call say whose it is."""
    default: str = ""
    """Policy of calls that no matcher chooses; empty refuses them (404)."""


class GatewayConfig(_Section):
    """`[gateway]`"""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(0, ge=0, le=65535)
    """0 takes a free one."""
    hold_timeout_s: float = Field(600.0, gt=0)
    """Longest wait of a call while weights are updated."""
    drain_timeout_s: float = Field(60.0, gt=0)
    """Longest wait for calls in flight before they are aborted."""
    upstream_timeout_s: float = Field(300.0, gt=0)
    """Longest wait for an engine."""
    max_body_bytes: int = Field(16 * 1024 * 1024, ge=1024)
    """Larger requests are refused with 413."""
    admin_key_env: str = "LEYDEN_ADMIN_KEY"
    """Environment variable with the administrator's key; a random one is made when it is unset."""
    client_timeout_s: float = Field(60.0, gt=0)
    """Longest time for a request to arrive whole, and for a client to take nothing of what it is sent."""
    shutdown_timeout_s: float = Field(5.0, ge=0)
    """How long calls in flight may go on after SIGTERM; then they are stopped, and what came is recorded."""
    engine_hosts: list[str] = []
    """Hosts (`*` matches) and networks (`10.0.0.0/8`) at which engines may be registered; empty allows loopback and
    private addresses. Link-local addresses are never allowed; engines of this file always are."""
    probe_at_start: bool = True
    """Find out at start-up whether the engines of trainable policies return token ids and log-probabilities."""
    health_interval_s: float = Field(5.0, gt=0)
    """Pause between two checks of every replica."""
    eject_after: int = Field(3, ge=1)
    """Failures in a row after which calls avoid a replica until it answers a check."""
    tls_cert: str = ""
    """File of a certificate chain (PEM); with `tls_key` the gateway serves https."""
    tls_key: str = ""
    """File of its private key (PEM)."""
    log_format: Literal["text", "json"] = "text"
    """How log lines on standard error look; neither has keys or bodies."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """From `info` on there is a line per call."""


class Config(_Section):
    """The whole tree."""

    run: RunConfig = RunConfig()
    """Where runs go."""
    store: StoreConfig = StoreConfig()
    """Where things are recorded."""
    harness: HarnessConfig = HarnessConfig()
    """The agent."""
    tasks: TasksConfig = TasksConfig()
    """What is asked."""
    policies: dict[str, PolicyConfig] = {}
    """What is improved, by the name that calls ask for."""
    providers: dict[str, ProviderConfig] = {}
    """Model APIs of others, by the name that policies give."""
    rewards: RewardsConfig = RewardsConfig()
    """What is good."""
    probes: ProbesConfig = ProbesConfig()
    """How the rewards are tried before they are trusted."""
    sft: SftConfig | None = None
    """Supervised stage on `tasks.demos` before reinforcement learning; absent means none."""
    learn: LearnConfig = LearnConfig()
    """How it is improved."""
    prompts: PromptsConfig = PromptsConfig()
    """How prompts are improved, with `learn.algorithm` `bootstrap_demos`, `apo` or `gepa`."""
    eval: EvalConfig = EvalConfig()
    """How the gain is shown."""
    budget: BudgetConfig = BudgetConfig()
    """When a run stops."""
    costs: CostsConfig = CostsConfig()
    """What a machine costs, and for how much work."""
    gateway: GatewayConfig = GatewayConfig()
    """How calls are served."""
    match: MatchConfig = MatchConfig()
    """Whose calls are those that name no policy."""
    base_dir: Path = Field(Path("."), exclude=True)
    """Folder of the file; set by `load`, not a key."""

    @model_validator(mode="before")
    @classmethod
    def _lead(cls, tree: Any) -> Any:
        lead = several.lead_of(tree) if isinstance(tree, Mapping) else None
        return tree if lead is None else {**tree, "learn": {**(tree.get("learn") or {}), "policy": lead}}

    @model_validator(mode="after")
    def _check(self) -> "Config":
        if self.harness.command and self.harness.callable:
            raise ValueError("harness.command and harness.callable are both set; keep one")
        for name, policy in self.policies.items():
            if policy.splice and policy.engine and policy.engine_key_env != EMBEDDED_KEY_ENV:
                raise ValueError(
                    f"policies.{name}.splice is true, but {policy.engine} renders prompts by itself; leave "
                    f"policies.{name}.engine empty (the embedded sampler), or set splice = false"
                )
        several.check(self)
        for learn in several.learns(self):
            _check_lengths(learn)
        for component, gate in self.rewards.gates.items():
            if gate == component:
                raise ValueError(f"rewards.gates.{component} names itself; name another component")
        _check_schedule(self.rewards)
        _check_judge(self)
        _check_bounds(self.probes)
        for name, policy in self.policies.items():
            if not name.isprintable() or not name:
                raise ValueError(f"policies.{name!r} has a name that cannot be shown; it stands in headers")
            self._check_provider(name, policy)
        if bool(self.gateway.tls_cert) != bool(self.gateway.tls_key):
            raise ValueError("gateway.tls_cert and gateway.tls_key go together; set both or none")
        for name, limit in self.budget:
            if limit is not None and not 0 < limit < math.inf:
                raise ValueError(
                    f"budget.{name} is {limit}: a run could do nothing; give a number above 0, or leave the key out "
                    "for no limit"
                )
        return self

    def _check_provider(self, name: str, policy: PolicyConfig) -> None:
        if not policy.provider:
            return
        if policy.provider not in self.providers:
            known = ", ".join(sorted(self.providers)) or "none"
            raise ValueError(f"policies.{name}.provider is {policy.provider!r}, which is not there (known: {known})")
        if policy.trainable:
            raise ValueError(
                f"policies.{name} has a provider and trainable = true; a provider returns no token ids, so it cannot "
                "be trained: remove trainable, or use an engine"
            )
        if policy.engine:
            raise ValueError(f"policies.{name}.engine and policies.{name}.provider are both set; keep one")
        if not policy.model:
            raise ValueError(f"policies.{name}.model is empty; name the model as provider {policy.provider!r} does")

    def price_of(self, policy: str) -> PriceConfig | None:
        """The price of what answers under an alias: its own, else its provider's; None where neither has one."""
        found = self.policies.get(policy)
        if found is None:
            return None
        if found.usd_per_million is not None:
            return found.usd_per_million
        return self.providers[found.provider].usd_per_million if found.provider else None

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the policies that a run trains, `learn.policy` first."""
        return several.trained(self)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the policies that the embedded sampler serves as they are."""
        return several.frozen(self)

    def of(self, policy: str) -> "Config":
        """The configuration as a policy that is trained reads it: `learn` and `sft` are its own."""
        own = {"learn": several.learn_of(self, policy), "sft": several.sft_of(self, policy)}
        return self if own == {"learn": self.learn, "sft": self.sft} else self.model_copy(update=own)

    def resolve(self, path: str) -> Path:
        """`path` as an absolute path, relative to the configuration file."""
        return (self.base_dir / Path(path).expanduser()).resolve()


def _check_lengths(learn: LearnConfig) -> None:
    if learn.max_sequence_tokens == 1:
        raise ValueError("learn.max_sequence_tokens is 1: nothing can be predicted from nothing; use 2 or more")
    if learn.overlong == "window" and learn.importance_cap == 0 and learn.algorithm != "rejection_sft":
        raise ValueError(
            'learn.overlong = "window" trains with less context than was sampled from, so it needs importance '
            "weights; set learn.importance_cap above 0 (2.0 is the default)"
        )


def _check_schedule(rewards: RewardsConfig) -> None:
    for name, one in rewards.schedule.items():
        if name in rewards.weights:
            raise ValueError(f"{name!r} is in rewards.weights and in rewards.schedule; keep one of the two")
        if one.from_step >= one.to_step:
            raise ValueError(
                f"rewards.schedule.{name} goes from step {one.from_step} to step {one.to_step}; "
                "let to_step be the later one"
            )


def _check_judge(config: Config) -> None:
    judge = config.rewards.judge
    if not judge.policy:
        return
    if judge.policy in config.trained:
        raise ValueError(
            f"rewards.judge.policy = {judge.policy!r} is the policy that is trained; a policy must not judge itself"
        )
    if not judge.low < judge.high:
        raise ValueError(f"rewards.judge: low = {judge.low} is not below high = {judge.high}")


def _check_bounds(probes: ProbesConfig) -> None:
    for name, bound in probes.bounds.items():
        if not 0 <= bound <= 1:
            raise ValueError(f"probes.bounds.{name} = {bound} is no share; give a number from 0 to 1")
        if name in probes.skip:
            raise ValueError(f"probe {name!r} is in probes.skip and has a bound; keep one of the two")


def load(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read `path` (None: an empty file in the current folder) and apply overrides. Raises ConfigError."""
    tree: dict[str, Any] = {}
    base_dir = (path.parent if path else Path(".")).resolve()
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
            tree = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except FileNotFoundError:
            raise ConfigError(f"no configuration file {path}; write one with `leyden init`") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        if path.suffix == ".json":  # the resolved copy that is kept with a run
            base_dir = Path(tree.pop("base_dir", base_dir))
    for override in overrides:
        _override(tree, override)
    return from_tree(tree, base_dir=base_dir, where=str(path or "configuration"))


def origins(path: Path, overrides: Sequence[str] = ()) -> dict[str, str]:
    """Key to where it was set, `file NAME` or `override`, for keys that are not left to their defaults.

    The same reading as `load`, which must have succeeded. Keys inside a table such as `rewards.weights` count as one
    each.
    """
    text = path.read_text(encoding="utf-8")
    tree = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    found = dict.fromkeys(_leaves(tree, ""), f"file {path.name}")
    return found | dict.fromkeys((override.partition("=")[0].strip() for override in overrides), "override")


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def dump(config: Config) -> str:
    """The resolved configuration as JSON that `load` reads back to an equal one."""
    return json.dumps({**config.model_dump(mode="json"), "base_dir": str(config.base_dir)}, indent=2)


def from_tree(tree: Mapping[str, Any], *, base_dir: Path, where: str = "configuration") -> Config:
    """A checked Config from nested mappings. Raises ConfigError."""
    _check_keys(Config, tree, ())
    try:
        return Config.model_validate({**tree, "base_dir": base_dir})
    except ValidationError as error:
        lines = [
            f"  {'.'.join(str(p) for p in item['loc']) or 'configuration'} = {item['input']!r}: {item['msg']}"
            if item["type"] != "value_error"
            else f"  {item['msg'].removeprefix('Value error, ')}"
            for item in error.errors()
        ]
        raise ConfigError(f"{where} cannot be used:\n" + "\n".join(lines)) from None


def known_keys() -> dict[str, str]:
    """Every key with the documentation of its field, `policies.NAME.model` style, in order of declaration."""
    keys: dict[str, str] = {}
    _collect(Config, "", keys)
    return keys


def default_of(key: str) -> str:
    """Default of a key of `known_keys` as TOML-like text; empty when there is none."""
    section: type[_Section] = Config
    parts = [part for part in key.split(".") if part != "NAME"]
    for part in parts[:-1]:
        inner, _ = _section_of(section.model_fields[part].annotation)
        assert inner is not None
        section = inner
    default = section.model_fields[parts[-1]].get_default(call_default_factory=True)
    if default is None or default == "":
        return ""
    return json.dumps(default.model_dump() if isinstance(default, _Section) else default)


def _override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {override!r} is not of the form section.key=value, for example learn.steps=20")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    node = tree
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r} goes below {part!r}, which is {child!r} and not a section")
        node = child
    node[parts[-1]] = value


def _section_of(annotation: object) -> tuple[type[_Section] | None, bool]:
    """(the section class behind an annotation, whether it is a table of named sections)."""
    if isinstance(annotation, type) and issubclass(annotation, _Section):
        return annotation, False
    if get_origin(annotation) is dict:
        inner, _ = _section_of(get_args(annotation)[1])
        return inner, inner is not None
    for argument in get_args(annotation):
        inner, named = _section_of(argument)
        if inner is not None:
            return inner, named
    return None, False


def _check_keys(section: type[_Section], tree: Mapping[str, Any], path: tuple[str, ...]) -> None:
    known = [name for name, field in section.model_fields.items() if not field.exclude]
    for key, value in tree.items():
        if key not in known:
            if gone := renamed.successor((*path, key)):
                raise ConfigError(f"key {'.'.join((*path, key))!r} is gone; {gone}")
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {'.'.join((*path, near[0]))!r}?" if near else f"known here: {', '.join(known)}"
            raise ConfigError(f"unknown key {'.'.join((*path, key))!r}; {hint}")
        inner, named = _section_of(section.model_fields[key].annotation)
        if inner is None or not isinstance(value, Mapping):
            continue
        if named:
            for name, child in value.items():
                if isinstance(child, Mapping):
                    _check_keys(inner, child, (*path, key, name))
        else:
            _check_keys(inner, value, (*path, key))


def _collect(section: type[_Section], prefix: str, keys: dict[str, str]) -> None:
    for name, field in section.model_fields.items():
        if field.exclude:
            continue
        inner, named = _section_of(field.annotation)
        if inner is None:
            keys[prefix + name] = field.description or ""
        else:
            _collect(inner, f"{prefix}{name}.NAME." if named else f"{prefix}{name}.", keys)
