"""May this policy version serve users? Evaluation on tasks never trained on, and a gate that compares."""
