"""Mixture of experts for a few tokens: router, selected experts and shared expert, weights read once from memory."""

from pallas_kernels.moe_gemv.api import (
    BlockResult,
    Experts,
    ExpertsResult,
    RouterResult,
    block,
    experts,
    new_exchange,
    router,
)

__all__ = ["BlockResult", "Experts", "ExpertsResult", "RouterResult", "block", "experts", "new_exchange", "router"]
