"""The terms of the report, for a reader who meets them for the first time."""

TERMS: dict[str, str] = {
    "Task": "One thing that is asked, with a way to check the answer.",
    "Holdout": "Tasks that are never trained on. Only they can show that a policy has improved.",
    "Policy, policy version": "What answers the agent's model calls. A version is one fixed state of its "
    "weights, written policy@version.",
    "Rollout": "One run of the agent at one task.",
    "Reward": "The number that a rollout earned: named components, each with a weight, summed.",
    "pass@1": "The chance that one rollout solves a task, averaged over tasks.",
    "SFT": "Supervised fine-tuning: the policy imitates approved demonstrations.",
    "RL": "Reinforcement learning: the policy tries tasks and makes what earned more reward likelier.",
    "Group": "Rollouts of one task that are compared with each other. If all earn the same, the group "
    "teaches nothing (zero variance).",
    "Interval": "A range that would hold the true value in 95 of 100 repetitions with new tasks.",
    "p-value": "How often a difference at least this large would appear if both versions were equally good.",
    "Not separable": "The difference is too small for this many tasks; it may be chance.",
    "Outcome": "How a rollout ended. What the infrastructure broke is excluded, never counted as a failure "
    "of the policy.",
    "Conservation": "Every sampled token is trained exactly once or dropped for a named reason.",
    "KL": "How far the policy has moved from where it started, in nats per token.",
    "Entropy": "How undecided the policy is at each token. Near zero it repeats itself and stops exploring.",
    "Gradient norm": "The size of the update before it is clipped.",
    "Sampler-trainer gap": "Difference of the log-probabilities of the same token when sampled and when "
    "trained. It should be near zero.",
    "Memorised task": "A training task that every rollout of its group solves; it has nothing left to teach.",
}
