"""The next token from logits, without sorting the vocabulary."""

from pallas_kernels.sample.api import MAX_CANDIDATES, MAX_TOP_K, Slots, advance, sample

__all__ = ["MAX_CANDIDATES", "MAX_TOP_K", "Slots", "advance", "sample"]
