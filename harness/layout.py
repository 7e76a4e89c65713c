"""Names of the files and folders of a comparison and of a run, and of what leads there."""

FIRST_RANK = "ACCELPACT_FIRST_RANK"
"""Environment variable of the ranks of one launcher: how many ranks other launchers start before
them. Absent where there is but one launcher."""

RUNS = "runs"
COMPARISON = "comparison.json"
ENVIRONMENT = "environment.json"
REPORTED = "summary.json"
CHECKSUMS = "SHA256SUMS"

DRIFT = "drift.json"
"""Below a run's folder: numeric drift, which only tensors can tell."""
EVENTS = "events.jsonl"
"""Below a run's folder: what its ranks and its supervisor have recorded."""
CHECKPOINTS = "checkpoints"
"""Below a run's folder while it lasts; checkpoints are no records."""
REPLICA = "replica{}"
"""Below that, where each replica has a launcher of its own: its checkpoints."""
STATE = "state"
"""Below a run's folder until its block is compared: the ranks' final tensors."""
