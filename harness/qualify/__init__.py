"""`accelpact qualify`: trials on this machine's stack, and the envelope that they prove.

`trials` says what is tried, `running` does it, `evidence` reads from the records what the runtime
asked and what came of it, `table` sets the trials out as the paper's Table II.
"""

from harness.qualify.table import render

__all__ = ["render"]
