"""`python -m harness` is the same as the console script `accelpact`."""

from harness.cli import main

main()
