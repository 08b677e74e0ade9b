"""One warp picks a token's best experts from its logits and computes their weights.

Every block of the gate/up kernel does this again: reading 512 bytes and six rounds of a warp maximum cost less than a
kernel of their own. The weights, twelve divisions, are not needed to request an expert and are left for later.
"""

from __future__ import annotations

from pallas_kernels import emit
from pallas_kernels.dispatch import KernelUnsupported

LOG2E = 1.4426950408889634


def check(experts: int, active: int) -> None:
    """Raise KernelUnsupported where the keys would not fit."""
    if experts & (experts - 1) or not 64 <= experts <= 1 << 14 or not 1 <= active <= min(experts, 32):
        raise KernelUnsupported(f"{active} of {experts} experts; needs a power of two from 64 on, at most 32 active")


def keys_of(lane: emit.Lane, logits: emit.Address, experts: int) -> list[emit.Int]:
    """The lane's keys of one token. logits: its bfloat16 row.

    A key is the logit's bits in ascending order above the complement of the expert's number, so that one unsigned
    maximum gives the largest logit and, among equals, the lowest number.
    """
    per_lane = experts // 32
    chunk = min(4, per_lane // 2)
    at = logits + lane.lane * (per_lane * 2)
    return keys_from(lane, [w for i in range(0, per_lane // 2, chunk) for w in emit.load(at, chunk, offset=4 * i)])


def keys_from(lane: emit.Lane, words: list[emit.Int]) -> list[emit.Int]:
    """``keys_of`` logits that the lane holds: the pairs of its ``2 * len(words)`` consecutive experts."""
    per_lane = 2 * len(words)
    keys = []
    for j in range(per_lane):
        bits = words[j // 2] & 0xFFFF0000 if j % 2 else words[j // 2] << 16
        ordered = bits ^ emit.select(bits >= 0x80000000, 0xFFFF0000, 0x80000000)
        keys.append(ordered | (0xFFFF - j - lane.lane * per_lane))
    return keys


def take_best(keys: list[emit.Int]) -> tuple[emit.Int, list[emit.Int]]:
    """The warp's largest key, in all lanes, and the keys without it."""
    level = keys
    while len(level) > 1:  # a tree: the maxima of a level do not wait for each other
        level = [level[i].maximum(level[i + 1]) for i in range(0, len(level) - 1, 2)] + level[len(level) // 2 * 2 :]
    best = emit.warp_maximum(level[0])
    return best, [emit.select(key.equals(best), 0, key) for key in keys]


def descending(keys: list[emit.Int]) -> list[emit.Int]:
    """The lane's keys sorted, largest first (Batcher's odd-even merge sort)."""
    keys, count = list(keys), len(keys)
    width = 1
    while width < count:
        step = width
        while step:
            for first in range(step % width, count - step, 2 * step):
                for i in range(first, min(first + step, count - step)):
                    if i // (2 * width) == (i + step) // (2 * width):
                        a, b = keys[i], keys[i + step]
                        keys[i], keys[i + step] = a.maximum(b), a.minimum(b)
            step //= 2
        width *= 2
    return keys


def take_first(keys: list[emit.Int], more: int) -> tuple[emit.Int, list[emit.Int]]:
    """``take_best`` of ``descending`` keys, when ``more`` will be taken after this one: a third of the instructions."""
    best = emit.warp_maximum(keys[0])
    mine = keys[0].equals(best)
    after = [*keys[1:], emit.Int(0)]
    return best, [emit.select(mine, after[j], keys[j]) for j in range(min(more, len(keys)))]


def expert_of(key: emit.Int) -> emit.Int:
    """The expert's number."""
    return 0xFFFF - (key & 0xFFFF)


def weights_of(best: list[emit.Int]) -> list[emit.Float]:
    """The weights of the experts with these keys: sigmoids over their sum, rounded to bfloat16."""
    scores = [score_of(key) for key in best]
    return [share_of(score, scores) for score in scores]


def score_of(key: emit.Int) -> emit.Float:
    """The sigmoid of a key's logit."""
    ordered = key & 0xFFFF0000
    logit = (ordered ^ emit.select(ordered >= 0x80000000, 0x80000000, 0xFFFF0000)).bits_as_float()
    return emit.divide(1.0, emit.exp2(logit * -LOG2E) + 1.0)


def share_of(score: emit.Float, scores: list[emit.Float]) -> emit.Float:
    """A score over the sum of all, rounded to bfloat16."""
    return emit.round_bf16(emit.divide(score, sum(scores[1:], scores[0]) + 1e-20))


def best_of(keys: list[emit.Int], active: int) -> list[emit.Int]:
    """The warp's ``active`` largest keys, best first, the same in all lanes."""
    few, best = len(keys) <= 16, []
    keys = descending(keys) if few else keys
    for rank in range(active):
        top, keys = take_first(keys, active - 1 - rank) if few else take_best(keys)
        best.append(top)
    return best


def select(lane: emit.Lane, logits: emit.Address, experts: int, active: int) -> list[emit.Int]:
    """The keys of one token's ``active`` experts, best first, the same in all lanes."""
    return best_of(keys_of(lane, logits, experts), active)
