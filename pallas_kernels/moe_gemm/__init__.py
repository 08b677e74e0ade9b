"""Routed experts for many tokens (prefill, scoring)."""

from pallas_kernels.moe_gemm import mosaic
from pallas_kernels.moe_gemm.api import down, experts, gate_up
from pallas_kernels.moe_gemm.routing import Groups, group, natural_order, product_order, tile_rows

__all__ = ["Groups", "down", "experts", "gate_up", "group", "mosaic", "natural_order", "product_order", "tile_rows"]
