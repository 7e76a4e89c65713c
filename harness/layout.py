"""Names of the files and folders of a comparison and of a run."""

RUNS = "runs"
COMPARISON = "comparison.json"
ENVIRONMENT = "environment.json"
REPORTED = "summary.json"
CHECKSUMS = "SHA256SUMS"

DRIFT = "drift.json"
"""Below a run's folder: numeric drift, which only tensors can tell."""
CHECKPOINTS = "checkpoints"
"""Below a run's folder while it lasts; checkpoints are no records."""
STATE = "state"
"""Below a run's folder until its block is compared: the ranks' final tensors."""
