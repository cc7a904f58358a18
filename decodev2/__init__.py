"""decodev2: greedy batch-1 decoding with NF4 weights that stay packed, and the lab around it."""

import os

__version__ = "0.1.0"

# A step has some hundred short parallel regions. Threads that wait for the next one should spin,
# but OpenMP's default is so long that on a busy machine a waiting thread burns the time slice the
# working one needs (50 times slower). Read when torch loads its OpenMP, so it is set before.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
