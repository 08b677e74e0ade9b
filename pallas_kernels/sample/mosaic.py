"""The draw on NVIDIA GPUs: one block per row finds the candidates, draws the token and writes the slot back. No sort.

A step runs this once, with nothing of its code in a core's caches, and code comes in at about 1 KB a microsecond (an
18 KB version took 4.4 us in a chain and 20.9 in the step): the program is written to be short before anything else.

    tile maxima -> groups of 64 scores -> 128 maxima -> a threshold that at least k of them reach -> list of groups
    -> scores that reach it (a few more than k) -> ranked by comparing all pairs -> top-k, min-p, top-p, noise, argmax

At least k scores reach the threshold, so none of the k largest is missed; rank by rank the pairs then decide exactly.
Where more than 128 groups or scores reach it (ties, or large scores side by side), ``_exact`` takes over.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import emit
from pallas_kernels.dispatch import KernelUnsupported
from pallas_kernels.sample.shapes import (
    GREEDY_BELOW,
    LOWEST_TEMPERATURE,
    MAX_CANDIDATES,
    MAX_STOP_IDS,
    MAX_TOP_K,
    PROGRESS,
    REALS,
    TILE,
    WHOLES,
)

WARPS = 16
THREADS = WARPS * 32
GROUP = 4 * TILE  # scores under the four tile maxima that a thread loads at once
LISTED = 128  # groups that can be looked into
AT_ONCE = THREADS * 4 // GROUP  # groups that the block's threads read at once, four scores each
ROUNDS = 16  # of the search for the threshold: it ends 2^-16 of the maxima's range below the k-th of them
MAX_GROUPS = 16 * THREADS
LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453

ABOVE_MINUS_INFINITY = 0x00800000  # the lowest key of a number above it
INFINITY = 0xFF800000  # its key; those of NaN lie above
# Words of shared memory: counters, the threshold and the largest key, the token.
GROUPS_FOUND, SCORES_FOUND, THRESHOLD, TOP, TOKEN = 0, 4, 8, 12, 16


@dataclasses.dataclass(frozen=True)
class Spec:
    """reals, wholes: columns of the settings' arrays. slots: rows of them; 0: one a row, and only draw."""

    rows: int
    vocab: int
    reals: int
    wholes: int
    slots: int = 0

    @property
    def groups(self) -> int:
        return self.vocab // GROUP

    @property
    def each(self) -> int:
        """Groups of a thread."""
        return -(-self.groups // THREADS)


def _check(scores, tile_max) -> None:
    vocab = scores.shape[1]
    if scores.dtype != jnp.float32 or tile_max is None or tile_max.dtype != jnp.float32:
        raise KernelUnsupported(f"scores of {scores.dtype}, tile maxima {None if tile_max is None else tile_max.dtype}")
    if vocab % GROUP or vocab // GROUP > MAX_GROUPS:
        raise KernelUnsupported(f"a vocabulary of {vocab}: no multiple of {GROUP}, or too large")


def sample(scores, *, temperature, top_k, top_p, min_p, key, position, greedy, tile_max):
    """See ``api.sample``."""
    _check(scores, tile_max)
    reals = jnp.stack([jnp.where(greedy, 0.0, jnp.maximum(temperature, LOWEST_TEMPERATURE)), top_p, min_p], axis=-1)
    spec = Spec(*scores.shape, reals=3, wholes=1)
    return _kernel(spec)(scores, tile_max, reals, key, top_k, position)[0]


def advance(scores, tile_max, slots, reals, key, wholes, progress, out_count):
    """See ``api.advance``."""
    _check(scores, tile_max)
    if wholes.shape[1] != len(WHOLES) + MAX_STOP_IDS or reals.shape[1] != len(REALS):
        raise ValueError(f"settings of {reals.shape[1]} and {wholes.shape[1]} columns")
    spec = Spec(*scores.shape, reals=len(REALS), wholes=wholes.shape[1], slots=progress.shape[0])
    return tuple(_kernel(spec)(scores, tile_max, slots, reals, key, wholes, progress, out_count))


class _Row:
    """A row's settings. slot: its row in the settings' arrays."""

    def __init__(self, spec: Spec, lane: emit.Lane, ops: dict, row: emit.Int):
        self.slot = row
        if spec.slots:
            (slot,) = emit.load(ops["slots"] + row * 4)
            known = slot < spec.slots
            self.slot = slot = emit.select(known, slot, 0)
            _, self.position, self.limit, active = emit.load(ops["progress"].index(slot, 4 * len(PROGRESS)), 4)
            self.live = emit.both(known, active >= 1)
            self.position = self.position + 1
            stops = ops["wholes"].index(slot, 4 * spec.wholes) + (lane.lane & (MAX_STOP_IDS - 1)) * 4
            (self.stop,) = emit.load(stops, offset=4 * len(WHOLES))
        else:
            (self.position,) = emit.load(ops["position"] + row * 4)
            self.live = row >= 0
        (top_k,) = emit.load(ops["wholes"].index(self.slot, 4 * spec.wholes))
        self.top_k = emit.select(top_k >= 0x80000000, 1, top_k).maximum(1).minimum(MAX_TOP_K)
        reals = ops["reals"].index(self.slot, 4 * spec.reals)
        self.temperature, self.top_p, self.min_p = (emit.load_float(reals, offset=4 * i)[0] for i in range(3))
        self.key = emit.load(ops["key"].index(self.slot, 8), 2)


@emit.cached
def _kernel(spec: Spec):
    names = ["scores", "tile_max", *(["slots"] if spec.slots else []), "reals", "key", "wholes"]
    names += ["progress", "out_count"] if spec.slots else ["position", "token"]
    names += ["maxima", "best", "listed", "found", "ranked", "control", "counts"]

    def program(*addresses):
        ops = dict(zip(names, addresses, strict=True))
        lane, row = emit.Lane(), emit.block_index()
        # Thread t holds the maxima of groups t, t + THREADS, ...
        at = ops["tile_max"].index(row, spec.vocab // TILE * 4)
        numbers = [lane.thread + THREADS * j for j in range(spec.each)]
        words = [emit.load_float(at + number.minimum(spec.groups - 1) * 16, 4) for number in numbers]
        here = _Row(spec, lane, ops, row)
        with emit.when(here.live):
            best = emit.Float(float("-inf"))
            for j, (first, *others) in enumerate(words):
                for other in others:
                    first = first.maximum(other, nan=True)
                first = emit.select(numbers[j] < spec.groups, first, float("-inf"))
                emit.store_float(ops["maxima"] + lane.thread * 4, first, offset=THREADS * 4 * j)
                best = best.maximum(first, nan=True)
            _find_threshold(lane, ops, here, best)
            threshold, top = emit.load(ops["control"], 2, offset=THRESHOLD)
            with emit.when(emit.both(top >= ABOVE_MINUS_INFINITY, top < INFINITY)):
                _draw(spec, lane, ops, row, here, _number(threshold), _number(top))
            with emit.when(lane.warp.equals(0)):
                _write_back(spec, lane, ops, row, here)

    shared = [
        spec.each * THREADS * 4,
        THREADS * 4,
        LISTED * 4,
        MAX_CANDIDATES * 8,
        MAX_CANDIDATES * 16,
        32,
        2 * WARPS * 4,
    ]
    return emit.kernel(
        program,
        name="sample",
        out=[] if spec.slots else [jax.ShapeDtypeStruct((spec.rows,), jnp.int32)],
        shared=shared,
        grid=spec.rows,
        warps=WARPS,
        in_place=3 if spec.slots else 0,
    )


def _key(value: emit.Float) -> emit.Int:
    """An unsigned integer in the number's order; both zeros are equal; NaN without a sign, as sums have it, on top."""
    bits = (value + 0.0).bits()
    return bits ^ emit.select(bits >= 0x80000000, 0xFFFFFFFF, 0x80000000)


def _number(key: emit.Int) -> emit.Float:
    return (key ^ emit.select(key >= 0x80000000, 0x80000000, 0xFFFFFFFF)).bits_as_float()


def _quotient(a: emit.Float, b: emit.Float) -> emit.Float:
    """a / b for b of ordinary size, to the last bit but in rare cases: an IEEE division brings 100 instructions."""
    inverse = emit.reciprocal(b)
    guess = a * inverse
    return emit.fma(emit.fma(emit.Float(0.0) - guess, b, a), inverse, guess)


def _sum(values):
    return sum(values[1:], values[0])


def _find_threshold(lane: emit.Lane, ops: dict, here: _Row, best: emit.Float) -> None:
    """Puts a key that at least top_k groups reach into shared memory, and the largest. One warp searches, over the
    maxima of 128 sets of groups, so that no round waits for the block."""
    emit.store(ops["best"] + lane.thread * 4, _key(best))
    with emit.when(lane.thread.equals(0)):
        emit.store(ops["control"], emit.Int(0), emit.Int(0))
        emit.store(ops["control"], emit.Int(0xFFFFFFFF), offset=TOKEN)
    emit.barrier()
    with emit.when(lane.warp.equals(0)):
        sets = []
        for i in range(THREADS // 128):
            a, b, c, d = emit.load(ops["best"] + lane.lane * 16, 4, offset=512 * i)
            sets.append(a.maximum(b).maximum(c.maximum(d)))
        highest, lowest = sets[0], sets[0]
        for other in sets[1:]:
            highest, lowest = highest.maximum(other), lowest.minimum(other)
        top = emit.warp_maximum(highest)
        low = emit.warp_maximum(lowest ^ 0xFFFFFFFF) ^ 0xFFFFFFFF

        def narrow(i, carry):
            (found,) = carry
            trial = found + ((top - low) >> (i + 1))
            count = emit.warp_total(_sum([emit.select(key >= trial, 1, 0) for key in sets]))
            return [emit.select(count >= here.top_k, trial, found)]

        (found,) = emit.loop(0, ROUNDS, 1, [low], narrow, rolled=True)
        with emit.when(lane.lane.equals(0)):
            emit.store(ops["control"], found.maximum(ABOVE_MINUS_INFINITY), top, offset=THRESHOLD)
    emit.barrier()


def _draw(spec: Spec, lane: emit.Lane, ops: dict, row, here: _Row, floor: emit.Float, best: emit.Float) -> None:
    """All threads: from the threshold to the token in shared memory. best: the largest score."""
    control, listed = ops["control"], ops["listed"]
    scores = ops["scores"].index(row, spec.vocab * 4)

    def group(j):
        """The thread's j-th group: its maximum, its number."""
        return emit.load_float(ops["maxima"] + (lane.thread + j * THREADS) * 4)[0], lane.thread + j * THREADS

    def list_group(value: emit.Float, number: emit.Int, chosen) -> None:
        with emit.when(chosen):
            place = emit.atomic_add(control + GROUPS_FOUND, 1)
            with emit.when(place < LISTED):
                emit.store(listed + place * 4, number)

    def look_at_group(j, _):
        value, number = group(j)
        list_group(value, number, value >= floor)
        return []

    emit.loop(0, spec.each, 1, [], look_at_group, rolled=True)
    emit.barrier()
    (groups,) = emit.load(control, offset=GROUPS_FOUND)
    with emit.when(groups >= LISTED + 1):
        _exact(lane, ops, group, emit.Int(spec.each), here.top_k, LISTED, control + GROUPS_FOUND, list_group)
        emit.barrier()
    (groups,) = emit.load(control, offset=GROUPS_FOUND)

    def listed_at(place: emit.Int) -> emit.Int:
        """First token of a listed group; beyond the list that of any."""
        return emit.load(listed + place.minimum(LISTED - 1) * 4)[0].minimum(spec.groups - 1) * GROUP

    def list_score(value: emit.Float, token: emit.Int, chosen) -> None:
        with emit.when(chosen):
            place = emit.atomic_add(control + SCORES_FOUND, 1)
            with emit.when(place < MAX_CANDIDATES):
                emit.store(ops["found"] + place * 8, value.bits(), token)

    def look_at_scores(start, _):
        place = (lane.thread >> 4) + start
        token = listed_at(place) + (lane.thread & 15) * 4
        values = emit.load_float(scores + token * 4, 4)
        there = place < groups

        def one(j, values):
            list_score(values[0], token + j, emit.both(there, values[0] >= floor))
            return [*values[1:], values[0]]

        emit.loop(0, 4, 1, values, one, rolled=True)
        return []

    emit.loop(0, groups, AT_ONCE, [], look_at_scores, rolled=True)
    emit.barrier()
    (count,) = emit.load(control, offset=SCORES_FOUND)
    with emit.when(count >= MAX_CANDIDATES + 1):

        def score(j):
            """The thread's j-th score in listed groups, and its token."""
            flat = lane.thread + j * THREADS
            token = listed_at(flat // GROUP) + flat % GROUP
            (value,) = emit.load_float(scores + token * 4)
            return emit.select(flat // GROUP < groups, value, float("-inf")), token

        each = (groups * GROUP + (THREADS - 1)) // THREADS
        _exact(lane, ops, score, each, here.top_k, MAX_CANDIDATES, control + SCORES_FOUND, list_score)
        emit.barrier()
    (count,) = emit.load(control, offset=SCORES_FOUND)
    _choose(lane, ops, here, count, best)


def _exact(lane: emit.Lane, ops: dict, entry, each: emit.Int, wanted, room: int, counter, keep) -> None:
    """List values from the ``wanted``-th largest up: all above it, and as many equal ones as there is room for, those
    with low numbers. entry(j): the thread's j-th value and its number, of ``each``.

    Every count goes through the whole block, 65 in all; a barrier must follow.
    """

    def total(holds, area: emit.Address) -> emit.Int:
        def one(j, carry):
            value, number = entry(j)
            return [carry[0] + emit.select(holds(_key(value), number), 1, 0)]

        return _block_total(lane, emit.loop(0, each, 1, [emit.Int(0)], one, rolled=True)[0], area)

    def search(holds, enough):
        """Largest number with an ``enough`` count of entries for which holds(key, number, it), bit by bit."""

        def step(i, carry):
            (found,) = carry
            trial = found | (emit.Int(0x80000000) >> i)
            area = ops["counts"] + (i & 1) * (WARPS * 4)  # the other one may still be read
            count = total(lambda key, number: holds(key, number, trial), area)
            return [emit.select(enough(count), trial, found)]

        (found,) = emit.loop(0, 32, 1, [emit.Int(0)], step, rolled=True)
        emit.barrier()
        return found

    nth = search(lambda key, _, trial: key >= trial, lambda count: count >= wanted).maximum(ABOVE_MINUS_INFINITY)
    above = total(lambda key, _: key >= nth + 1, ops["counts"])
    emit.barrier()

    def equal_below(key, number, bound):
        return emit.both(key.equals(nth), number < bound)

    bound = search(equal_below, lambda count: emit.Int(room) >= count + above)
    with emit.when(lane.thread.equals(0)):
        emit.store(counter, emit.Int(0))
    emit.barrier()

    def list_one(j, _):
        value, number = entry(j)
        key = _key(value)
        keep(value, number, emit.either(key >= nth + 1, equal_below(key, number, bound)))
        return []

    emit.loop(0, each, 1, [], list_one, rolled=True)


def _block_total(lane: emit.Lane, count: emit.Int, area: emit.Address) -> emit.Int:
    total = emit.warp_total(count)
    with emit.when(lane.lane.equals(0)):
        emit.store(area + lane.warp * 4, total)
    emit.barrier()
    return _sum([part for w in range(0, WARPS, 4) for part in emit.load(area, 4, offset=4 * w)])


def _choose(lane: emit.Lane, ops: dict, here: _Row, count: emit.Int, best: emit.Float) -> None:
    """From ``count`` unordered candidates to the token: four threads for each of MAX_CANDIDATES places."""
    place, part = lane.thread >> 2, lane.thread & 3
    busy = emit.select((lane.warp << 3) < count, count, 0)  # the other warps have nothing to do
    present = place < count

    def others(body, carry):
        """body(j, whether there is one, carry) for the candidates that the thread compares its own with."""

        def one(start, carry):
            j = start + part
            return body(j.minimum(MAX_CANDIDATES - 1), j < count, carry)

        return emit.loop(0, busy, 4, carry, one, rolled=True)

    bits, token = emit.load(ops["found"] + place * 8, 2)
    score = bits.bits_as_float()

    def compare(j, there, carry):
        """Ranked before mine: in the lower half of a word; larger than mine: in the upper half."""
        bits, other = emit.load(ops["found"] + j * 8, 2)
        value = bits.bits_as_float()
        before = emit.both(value >= score, other < token)
        one = emit.select(value > score, 0x10001, emit.select(before, 1, 0))
        return [carry[0] + emit.select(there, one, 0)]

    (rank,) = others(compare, [emit.Int(0)])
    for distance in (1, 2):
        rank = rank + emit.shuffle_xor_int(rank, distance)
    tempered = _quotient(score - best, here.temperature.maximum(LOWEST_TEMPERATURE))
    likely = tempered >= emit.log2(here.min_p) * LN2
    kept = emit.both((rank >> 16) < here.top_k, likely)
    mass = emit.select(kept, emit.exp2(tempered * LOG2E), 0.0)
    tempered = emit.select(kept, tempered, float("-inf"))
    with emit.when(emit.both(present, part.equals(0))):
        emit.store(ops["ranked"] + (rank & 0xFFFF) * 16, tempered.bits(), mass.bits(), token, token)
    emit.barrier()

    bits, _, token, _ = emit.load(ops["ranked"] + place * 16, 4)
    tempered = bits.bits_as_float()

    def add(j, there, carry):
        (mass,) = emit.load_float(ops["ranked"] + j * 16, offset=4)
        mass = emit.select(there, mass, 0.0)
        return [carry[0] + mass, carry[1] + emit.select(j >= place, mass, 0.0)]

    # From the unlikely end up to and including mine: there float32 resolves a top_p near 1.
    total, up_to_mine = (emit.sum_lanes(x, (1, 2)) for x in others(add, [emit.Float(0.0)] * 2))
    first = place.equals(0)
    inside = emit.either(here.top_p >= 1.0, up_to_mine > (emit.Float(1.0) - here.top_p) * total)
    inside = emit.both(emit.either(inside, first), tempered > float("-inf"))
    noisy = tempered + _gumbel(here, token, emit.select(busy >= 1, 2, 0))
    key = emit.select(emit.both(present, inside), _key(noisy), 0)
    key = emit.select(emit.Float(GREEDY_BELOW) > here.temperature, emit.select(first, 1, 0), key)
    with emit.when(part.equals(0)):
        emit.store(ops["best"] + place * 4, key)
    emit.barrier()
    with emit.when(lane.warp.equals(0)):
        keys = emit.load(ops["best"] + lane.lane * 16, 4)
        top = emit.warp_maximum(keys[0].maximum(keys[1]).maximum(keys[2].maximum(keys[3])))
        lowest = emit.Int(0)
        for j, key in enumerate(keys):  # of equal ones the lowest token
            (token,) = emit.load(ops["ranked"] + (lane.lane * 4 + j) * 16, offset=8)
            lowest = lowest.maximum(emit.select(key.equals(top), token ^ 0xFFFFFFFF, 0))
        lowest = emit.warp_maximum(lowest)
        with emit.when(lane.lane.equals(0)):
            emit.store(ops["control"], lowest ^ 0xFFFFFFFF, offset=TOKEN)


def _gumbel(here: _Row, token: emit.Int, twice: emit.Int) -> emit.Float:
    """As ``draw.gumbel``, to about two units in the last place. twice: 2, or 0 in warps whose result nobody needs.

    The cipher runs twice in one loop: from the position it makes the key of the second round, whose counter is the
    token.
    """

    def cipher(i, key):
        def rounds(group, carry):
            x0, x1, a, b, c, turns, next_turns = carry  # a byte of ``turns`` is a rotation, its low five bits count
            for j in range(4):
                x0 = x0 + x1
                x1 = emit.rotate_left(x1, turns >> 8 * j) ^ x0
            return [x0 + b, x1 + c + group + 1, b, c, a, next_turns, turns]

        first, second = key
        counter = emit.select(i.equals(0), here.position, token)
        turns = [emit.Int(sum(n << 8 * j for j, n in enumerate(four))) for four in ((13, 15, 26, 6), (17, 29, 16, 24))]
        start = [first, counter + second, first, second, first ^ second ^ 0x1BD11BDA, *turns]
        return emit.loop(0, 5, 1, start, rounds, rolled=True)[:2]

    high, low = emit.loop(0, twice, 1, list(here.key), cipher, rolled=True)
    uniform = (emit.to_float(high ^ low) + 0.5) * 2.0**-32
    uniform = emit.select(uniform > 1.0 - 2.0**-24, 1.0 - 2.0**-24, uniform)
    # -log(1 - u): near 0 as 2 artanh(u / (2 - u)), whose series loses no digits there.
    s = uniform * emit.reciprocal(emit.Float(2.0) - uniform)
    square, series = s * s, emit.Float(1 / 9)
    for power in (7, 5, 3, 1):
        series = emit.fma(series, square, 1 / power)
    near, far = s * series * 2.0, emit.log2(emit.Float(1.0) - uniform) * -LN2
    return emit.log2(emit.select(uniform > 0.25, far, near)) * -LN2


def _write_back(spec: Spec, lane: emit.Lane, ops: dict, row, here: _Row) -> None:
    """Warp 0: the token, and what follows from it for the slot."""
    emit.warp_barrier()
    (token,) = emit.load(ops["control"], offset=TOKEN)
    if not spec.slots:
        with emit.when(lane.lane.equals(0)):
            emit.store(ops["token"] + row * 4, token)
        return
    drawn = token < spec.vocab
    stopped = emit.warp_total(emit.select(here.stop.equals(token), 1, 0)) >= 1
    over = emit.either(emit.either(stopped, emit.negate(drawn)), here.position >= here.limit)
    with emit.when(lane.lane.equals(0)):
        active = emit.select(over, 0, 1)
        at = ops["progress"].index(here.slot, 4 * len(PROGRESS))
        emit.store(at, token, here.position, here.limit, active)
        with emit.when(drawn):
            wholes = ops["wholes"].index(here.slot, 4 * spec.wholes)
            emit.add_to(wholes + 4 * WHOLES.index("generated"), 1)
            emit.add_to(ops["out_count"].index(here.slot, 4 * spec.vocab) + token * 4, 1)
