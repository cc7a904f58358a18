"""decodev2: greedy batch-1 decoding with NF4 weights that stay packed, and the lab around it."""

__version__ = "0.1.0"
