"""Attention of many tokens (prefill), and their keys and values into the cache."""

from pallas_kernels.flash_attention import mosaic, write
from pallas_kernels.flash_attention.api import attend_pages, attend_ring, write_cache
from pallas_kernels.flash_attention.pieces import TILE, Pieces

__all__ = ["TILE", "Pieces", "attend_pages", "attend_ring", "mosaic", "write", "write_cache"]
