"""What one warp does with one head of 128 values: four values a lane, dims 4 l .. 4 l + 3 in lane l."""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels import emit

WIDTH = 128
BYTES = WIDTH * 2


class Rotation(NamedTuple):
    """The lane's cos and sin, four each."""

    cos: list[emit.Float]
    sin: list[emit.Float]


def load_rotation(lane: emit.Lane, table: emit.Address, position: emit.Int) -> Rotation:
    """The row of a float32 table [P, cos | sin] for one position."""
    at = table.index(position, WIDTH * 4) + (lane.lane & 15) * 16
    return Rotation(emit.load_float(at, 4), emit.load_float(at, 4, offset=WIDTH * 2))


def load_head(lane: emit.Lane, at: emit.Address) -> list[emit.Float]:
    """The lane's four bfloat16 values of a head (or of its norm's weight)."""
    return [value for word in emit.load(at + lane.lane * 8, 2) for value in emit.bf16_pair(word)]


def norm_rotate(
    lane: emit.Lane, x: list[emit.Float], weight: list[emit.Float], eps: float, rotation: Rotation | None
) -> list[emit.Int]:
    """RMSNorm, rounded; then RoPE, rounded once more. Two words, four bfloat16."""
    square = emit.Float(0.0)
    for value in x:
        square = emit.fma(value, value, square)
    factor = emit.rsqrt(emit.fma(emit.sum_lanes(square, (1, 2, 4, 8, 16)), 1.0 / WIDTH, eps))
    x = [emit.round_bf16(value * factor * w) for value, w in zip(x, weight, strict=True)]
    if rotation is not None:
        upper = lane.lane >= 16
        turned = []
        for value, cos, sin in zip(x, *rotation, strict=True):
            other = emit.shuffle_xor(value, 16) * sin
            turned.append(value * cos + emit.select(upper, other, emit.Float(0.0) - other))
        x = turned
    return [emit.to_bf16_pair(x[0], x[1]), emit.to_bf16_pair(x[2], x[3])]
