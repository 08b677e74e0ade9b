"""Mixture of experts for a few tokens: router, selected experts and shared expert, weights read once from memory."""

from pallas_kernels.moe_gemv.api import Experts, ExpertsResult, RouterResult, experts, router

__all__ = ["Experts", "ExpertsResult", "RouterResult", "experts", "router"]
