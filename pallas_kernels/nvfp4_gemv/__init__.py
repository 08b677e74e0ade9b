"""Dense matrix times a few tokens, weights read once from memory: NVFP4 or BF16."""

from pallas_kernels.nvfp4_gemv.api import Norm, gemv

__all__ = ["Norm", "gemv"]
