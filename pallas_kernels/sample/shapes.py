"""Sizes and column orders that the kernel, its reference and the callers share."""

TILE = 16  # scores under one tile maximum
MAX_TOP_K = 64
MAX_CANDIDATES = 128  # of a row: top-k ones and ties with the last of them

# Columns of the arrays that hold a slot's settings and progress.
REALS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
WHOLES = ("top_k", "min_tokens", "generated")  # then MAX_STOP_IDS stop ids, padded with -1
PROGRESS = ("token", "position", "limit", "active")
MAX_STOP_IDS = 16  # token ids that can end one request on the device, the model's own end tokens included

GREEDY_BELOW = 1e-5  # a temperature under this is greedy
LOWEST_TEMPERATURE = 0.01  # one between GREEDY_BELOW and this is raised to it
