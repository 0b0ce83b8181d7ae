"""What a run does between steps: metrics, checkpoints, evaluation, signals, bad steps, comparisons."""
