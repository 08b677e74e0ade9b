"""The next token from logits, without sorting the vocabulary."""

from pallas_kernels.sample.api import MAX_CANDIDATES, MAX_TOP_K, Candidates, sample, top_candidates

__all__ = ["MAX_CANDIDATES", "MAX_TOP_K", "Candidates", "sample", "top_candidates"]
