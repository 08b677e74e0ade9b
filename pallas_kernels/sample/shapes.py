"""Sizes that the kernel, its reference and the drawing share."""

TILE = 16  # scores under one tile maximum
MAX_TOP_K = 64
MAX_CANDIDATES = 128  # of a row: top-k ones and ties with the last of them
