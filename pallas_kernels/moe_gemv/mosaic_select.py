"""One warp picks a token's best experts from its logits and computes their weights.

Every block of the gate/up kernel does this again: reading 512 bytes and six rounds of a warp maximum cost less than a
kernel of their own.
"""

from __future__ import annotations

from pallas_kernels import emit
from pallas_kernels.dispatch import KernelUnsupported

LOG2E = 1.4426950408889634


def check(experts: int, active: int) -> None:
    """Raise KernelUnsupported where the keys would not fit."""
    if experts % 64 or experts > 1 << 14 or not 1 <= active <= min(experts, 32):
        raise KernelUnsupported(f"{active} of {experts} experts; needs a multiple of 64 and at most 32 active ones")


def select(lane: emit.Lane, logits: emit.Address, experts: int, active: int) -> tuple[list, list]:
    """(ids, weights) of one token, best first, the same in all lanes. logits: its bfloat16 row.

    A key is the logit's bits in ascending order above the complement of the expert's number, so that one unsigned
    maximum gives the largest logit and, among equals, the lowest number.
    """
    per_lane = experts // 32
    chunk = min(4, per_lane // 2)
    at = logits + lane.lane * (per_lane * 2)
    words = [w for i in range(0, per_lane // 2, chunk) for w in emit.load(at, chunk, offset=4 * i)]
    keys = []
    for j in range(per_lane):
        bits = words[j // 2] & 0xFFFF0000 if j % 2 else words[j // 2] << 16
        ordered = bits ^ emit.select(bits >= 0x80000000, 0xFFFF0000, 0x80000000)
        keys.append(ordered | (0xFFFF - j - lane.lane * per_lane))
    ids, scores = [], []
    for _ in range(active):
        best = keys[0]
        for key in keys[1:]:
            best = best.maximum(key)
        best = emit.warp_maximum(best)
        keys = [emit.select(key.equals(best), 0, key) for key in keys]
        ids.append(0xFFFF - (best & 0xFFFF))
        ordered = best & 0xFFFF0000
        logit = (ordered ^ emit.select(ordered >= 0x80000000, 0x80000000, 0xFFFF0000)).bits_as_float()
        scores.append(emit.divide(1.0, emit.exp2(logit * -LOG2E) + 1.0))
    total = sum(scores[1:], scores[0]) + 1e-20
    return ids, [emit.round_bf16(emit.divide(score, total)) for score in scores]
