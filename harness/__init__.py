"""One harness that runs interchangeable recovery strategies on identical workloads."""
