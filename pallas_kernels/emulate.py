"""Run the kernels' programs on the CPU, all threads of a block in lockstep, as numpy arrays.

Pallas cannot interpret bodies emitted inside ``inline_mgpu``, so this module gives the vocabulary of ``emit`` a second
meaning: an ``Int`` holds one value per thread, ``when`` masks, ``mma`` multiplies. What it checks beyond numbers:

- every address lies inside its buffer and is aligned to the access;
- barriers, shuffles and products are reached by all the threads that take part;
- a word of shared memory is never read by another thread before a barrier that covers both;
- a wait for a bulk copy waits for the phase that was requested;
- what an asynchronous copy brings is NaN until the wait for its group; so are the sums of a product of four warps,
  whose values nobody may overwrite before that, and which reads nothing without a fence and a barrier behind its
  writing;
- blocks of a ``resident`` kernel, which run in lockstep, exchange words in program order, under a tag that the place
  did not carry before; nothing else that a block wrote to global memory is read by another.

It cannot see speed, memory ordering between blocks, or what the assembler makes of the program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np

from pallas_kernels import emit

_SPACE = 40  # bits of an address inside one buffer
_SHARED = 1 << 15
BACKWARDS = False  # run the blocks (clusters) that are not bound to run together from the last to the first


class _Machine:
    """One cluster of blocks being executed (mostly of one block), their shared memories one after the other."""

    def __init__(self, buffers: Sequence[np.ndarray], shared: int, threads: int, first: int, cluster: int):
        self.buffers, self.shared = buffers, np.full(shared * cluster, 0xFF, np.uint8)
        self.threads, self.block_threads, self.shared_bytes = threads * cluster, threads, shared
        self.rank = np.repeat(np.arange(cluster), threads)
        self.block = first + self.rank
        self.mask = np.ones(self.threads, bool)
        self.arrivals: dict[int, int] = {}
        self.missing: dict[int, int] = {}  # bytes announced for an arrival and not yet copied
        self.copies: list[list[tuple]] = [[]]  # groups of (lanes, places [lanes, 16], bytes), the open one last
        words = self.shared.size // 4
        self.writer = np.full(words, -1)
        # Order through arrivals: a count of events, when a word was written, when a warp last met at a warp barrier;
        # per arrival (warp, that time, thread, its own time); per waiting warp those of the arrivals it waited for.
        self.events, self.written_event = 0, np.zeros(words, int)
        self.met = np.zeros(self.threads // 32, int)
        self.released: dict[int, tuple[int, int, int, int]] = {}
        self.knows: dict[int, list[tuple[int, int, int, int]]] = {}
        self.written_cluster, self.written_block = np.zeros(words, int), np.zeros(words, int)
        self.written_warp = np.zeros(words, int)
        self.cluster_epoch, self.block_epoch, self.warp_epoch = 0, 0, np.zeros(self.threads // 32, int)
        # Who read a word of shared memory last: warps of its block (bits), a thread of them, and when.
        self.readers, self.reader = np.zeros(words, np.uint64), np.full(words, -1)
        self.read_cluster, self.read_block, self.read_warp = (np.full(words, -1) for _ in range(3))
        self.flying: dict[int, list[tuple]] = {}  # per arrival what the copy engine still has to bring
        # Products of four warps: what was written since its writer's last fence for them; per group of warps the words
        # that each unfinished product reads, and how many unfinished products read a word.
        self.unfenced, self.busy = np.zeros(words, bool), np.zeros(words, int)
        self.products: dict[int, list[np.ndarray]] = {}
        # Copies on their way to a word; who made an arrival, and when.
        self.incoming = np.zeros(words, int)
        self.born: dict[int, tuple[int, int, int]] = {}
        # Per word of global memory the block that wrote it in this launch; kept only where all blocks run together.
        self.owners: dict[int, np.ndarray] = {}

    def _locate(self, addresses: np.ndarray, nbytes: int):
        """Yield (buffer, lanes, offsets) for the active lanes."""
        lanes = np.flatnonzero(self.mask)
        if (addresses[lanes] % nbytes).any():
            raise AssertionError(f"an address is not aligned to {nbytes} bytes")
        spaces = addresses[lanes] >> _SPACE
        for space in np.unique(spaces):
            here = lanes[spaces == space]
            offsets = (addresses[here] & ((1 << _SPACE) - 1)).astype(np.int64)
            buffer = self.shared if space == _SHARED else self.buffers[int(space) - 1]
            if (offsets + nbytes > buffer.size).any():
                raise AssertionError(f"access of {nbytes} bytes at {offsets.max()} in a buffer of {buffer.size}")
            yield buffer, here, offsets

    def read(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        """uint8 [threads, nbytes]; zero in inactive lanes."""
        result = np.zeros((self.threads, nbytes), np.uint8)
        for buffer, lanes, offsets in self._locate(addresses, nbytes):
            places = offsets[:, None] + np.arange(nbytes)
            result[lanes] = buffer[places]
            if buffer is self.shared:
                self._check_race(lanes, places[:, ::4] // 4)
                self._note_read(lanes, places[:, ::4] // 4)
            elif id(buffer) in self.owners:
                owner = self.owners[id(buffer)][places[:, ::4] // 4]
                if ((owner >= 0) & (owner != self.block[lanes][:, None])).any():
                    raise AssertionError("global memory written by another block of this launch read like any other")
        return result

    def write(self, addresses: np.ndarray, data: np.ndarray) -> None:
        nbytes = data.shape[1]
        for buffer, lanes, offsets in self._locate(addresses, nbytes):
            places = offsets[:, None] + np.arange(nbytes)
            buffer[places] = data[lanes]
            if buffer is self.shared:
                self._mark(lanes, places[:, ::4] // 4)
            elif id(buffer) in self.owners:
                self.owners[id(buffer)][places[:, ::4] // 4] = self.block[lanes][:, None]

    def _note_read(self, lanes: np.ndarray, words: np.ndarray) -> None:
        fresh = self.read_block[words] != self.block_epoch
        self.readers[words[fresh]] = 0
        bit = np.uint64(1) << (lanes % self.block_threads // 32).astype(np.uint64)
        np.bitwise_or.at(self.readers, words, np.broadcast_to(bit[:, None], words.shape))
        self.reader[words] = lanes[:, None]
        self.read_cluster[words], self.read_block[words] = self.cluster_epoch, self.block_epoch
        self.read_warp[words] = self.warp_epoch[lanes // 32][:, None]

    def check_overwrite(self, lanes: np.ndarray, words: np.ndarray) -> None:
        """Nobody may still be reading what these lanes write."""
        if self.busy[words].any():
            raise AssertionError("shared memory written while a product of four warps may still read it")
        if self.incoming[words].any():
            raise AssertionError("shared memory written while a copy to it is on its way")
        home = words // (self.shared_bytes // 4)
        own_block = home == lanes[:, None] // self.block_threads
        now = (self.read_block[words] == self.block_epoch) & (self.read_cluster[words] == self.cluster_epoch)
        mine = np.uint64(1) << (lanes % self.block_threads // 32).astype(np.uint64)
        others = (self.readers[words] & ~mine[:, None]) != 0
        same_warp = (self.reader[words] // 32 == lanes[:, None] // 32) & (self.reader[words] != lanes[:, None])
        same_warp &= self.read_warp[words] == self.warp_epoch[lanes // 32][:, None]
        bad = (own_block & now & (others | same_warp)) | (
            ~own_block & (self.readers[words] != 0) & (self.read_cluster[words] == self.cluster_epoch)
        )
        if bad.any():
            raise AssertionError("shared memory written before a barrier after its reading by another thread")

    def _mark(self, lanes: np.ndarray, words: np.ndarray, check: bool = True) -> None:
        if check:
            self.check_overwrite(lanes, words)
        self.events += 1
        self.unfenced[words] = True
        self.writer[words] = lanes[:, None]
        self.written_event[words] = self.events
        self.written_cluster[words] = self.cluster_epoch
        self.written_block[words] = self.block_epoch
        self.written_warp[words] = self.warp_epoch[lanes // 32][:, None]

    def finish_copies(self, groups: Sequence[list[tuple]]) -> None:
        for lanes, places, data in (copy for group in groups for copy in group):
            self.incoming[places[:, ::4] // 4] -= 1
            self.shared[places] = data
            self._mark(lanes, places[:, ::4] // 4, check=False)

    def _check_race(self, lanes: np.ndarray, words: np.ndarray) -> None:
        writer = self.writer[words]
        other = (writer >= 0) & (writer != lanes[:, None]) & (self.written_cluster[words] == self.cluster_epoch)
        same_block = writer // self.block_threads == lanes[:, None] // self.block_threads
        same_warp = writer // 32 == lanes[:, None] // 32
        synced = same_block & (self.written_block[words] < self.block_epoch)
        synced |= same_warp & (self.written_warp[words] < self.warp_epoch[lanes // 32][:, None])
        for warp in np.unique(lanes[(other & ~synced).any(1)] // 32):
            mine = (lanes // 32 == warp)[:, None]
            for source, met, thread, event in self.knows.get(int(warp), []):
                before = (writer // 32 == source) & (self.written_event[words] <= met)
                synced |= mine & (before | ((writer == thread) & (self.written_event[words] <= event)))
        if (other & ~synced).any():
            raise AssertionError("shared memory read before a barrier after its writing by another thread")

    def whole_warps(self, what: str) -> np.ndarray:
        """Which warps are active; every active one must be whole."""
        warps = self.mask.reshape(-1, 32)
        if (warps.any(1) != warps.all(1)).any():
            raise AssertionError(f"{what} reached by part of a warp")
        return warps[:, 0]


_machine: _Machine | None = None


def _now() -> _Machine:
    assert _machine is not None
    return _machine


def _full(value, dtype) -> np.ndarray:
    return np.full(_now().threads, value, dtype)


class Int:
    """uint32 per thread."""

    def __init__(self, value):
        self.raw = _full(value & 0xFFFFFFFF, np.uint32) if isinstance(value, int) else value.astype(np.uint32)

    def _with(self, op, other):
        with np.errstate(over="ignore"):
            return Int(op(self.raw, as_int(other).raw))

    def __add__(self, other):
        return self._with(np.add, other)

    __radd__ = __add__

    def __sub__(self, other):
        return self._with(np.subtract, other)

    def __rsub__(self, other):
        return as_int(other) - self

    def __mul__(self, other):
        return self._with(np.multiply, other)

    __rmul__ = __mul__

    def __floordiv__(self, other):
        return self._with(np.floor_divide, other)

    def __mod__(self, other):
        return self._with(np.remainder, other)

    def __and__(self, other):
        return self._with(np.bitwise_and, other)

    def __or__(self, other):
        return self._with(np.bitwise_or, other)

    def __xor__(self, other):
        return self._with(np.bitwise_xor, other)

    def __lshift__(self, other):
        return self._with(np.left_shift, other)

    def __rshift__(self, other):
        return self._with(np.right_shift, other)

    def __lt__(self, other):
        return self.raw < as_int(other).raw

    def __ge__(self, other):
        return self.raw >= as_int(other).raw

    def equals(self, other):
        return self.raw == as_int(other).raw

    def maximum(self, other):
        return self._with(np.maximum, other)

    def minimum(self, other):
        return self._with(np.minimum, other)

    def bits_as_float(self):
        return Float(self.raw.view(np.float32))


class Float:
    """float32 per thread."""

    def __init__(self, value):
        self.raw = _full(value, np.float32) if isinstance(value, (int, float)) else value.astype(np.float32)

    def _with(self, op, other):
        with np.errstate(all="ignore"):
            result = Float(op(self.raw, as_float(other).raw))
        result.raw.view(np.uint32)[np.isnan(result.raw)] = 0x7FFFFFFF  # the one NaN that the hardware gives
        return result

    def __add__(self, other):
        return self._with(np.add, other)

    __radd__ = __add__

    def __sub__(self, other):
        return self._with(np.subtract, other)

    def __mul__(self, other):
        return self._with(np.multiply, other)

    __rmul__ = __mul__

    def __gt__(self, other):
        return self.raw > as_float(other).raw

    def __ge__(self, other):
        return self.raw >= as_float(other).raw

    def maximum(self, other, nan: bool = False):
        return self._with(np.maximum if nan else np.fmax, other)

    def bits(self):
        return Int(self.raw.view(np.uint32))


class Address:
    """int64 per thread: buffer number and offset."""

    def __init__(self, raw, shared: bool):
        self.raw, self.shared = raw, shared

    def __add__(self, offset):
        return Address(self.raw + (offset if isinstance(offset, int) else offset.raw.astype(np.int64)), self.shared)

    def __and__(self, mask):
        return Int((self.raw & ((1 << _SPACE) - 1)).astype(np.uint32)) & mask

    def __rshift__(self, by):
        return Int((self.raw & ((1 << _SPACE) - 1)).astype(np.uint32)) >> by

    def __xor__(self, bits):
        return Address(self.raw ^ bits.raw.astype(np.int64), self.shared)

    def index(self, index, stride: int):
        return Address(self.raw + as_int(index).raw.astype(np.int64) * stride, self.shared)


def as_int(value):
    return value if isinstance(value, Int) else Int(value)


def as_float(value):
    return value if isinstance(value, Float) else Float(value)


def kernel(
    program,
    *,
    name: str,
    out,
    shared,
    grid: int,
    warps: int,
    in_place: int = 0,
    cluster: int = 1,
    resident: bool = False,
):
    """``emit.kernel`` on numpy arrays."""
    together = grid if resident else cluster

    def run(*inputs):
        global _machine
        kept = len(inputs) - in_place
        arrays = [np.ascontiguousarray(x) if i < kept else np.array(x) for i, x in enumerate(inputs)]
        arrays += [np.zeros(o.shape, o.dtype) for o in out]
        buffers = [a.reshape(-1).view(np.uint8) for a in arrays]
        for buffer in buffers[len(inputs) :]:
            buffer[:] = 0xFF  # NaN in every float type: what a kernel forgets to write shows
        starts = np.cumsum([0, *(-(-size // 16) * 16 for size in shared)])
        blocks = range(0, grid, together)
        for block in reversed(blocks) if BACKWARDS else blocks:
            _machine = _Machine(buffers, int(starts[-1]), warps * 32, block, together)
            if resident:
                _machine.owners = {id(b): np.full(-(-b.size // 4), -1) for b in buffers[kept:]}
            wide = [Address(_full((i + 1) << _SPACE, np.int64), False) for i in range(len(buffers))]
            mine = (_SHARED << _SPACE) + _machine.rank * _machine.shared_bytes
            near = [Address(mine + int(start), True) for start in starts[:-1]]
            program(*wide, *near)
        _machine = None
        return arrays[len(inputs) :] + arrays[kept : len(inputs)]

    return run


class Lane:
    def __init__(self):
        self.thread = Int(np.arange(_now().threads) % _now().block_threads)
        self.warp = self.thread >> 5
        self.lane = self.thread & 31
        self.g = self.lane >> 2
        self.q = self.lane & 3


def block_index():
    return Int(_now().block)


@contextlib.contextmanager
def when(predicate):
    machine = _now()
    before = machine.mask
    machine.mask = before & predicate
    yield
    machine.mask = before


def both(a, b):
    return a & b


def either(a, b):
    return a | b


def negate(a):
    return ~a


def select(predicate, yes, no):
    if isinstance(yes, Address):
        return Address(np.where(predicate, yes.raw, no.raw), yes.shared)
    if isinstance(yes, Float) or isinstance(no, Float):
        return Float(np.where(predicate, as_float(yes).raw, as_float(no).raw))
    return Int(np.where(predicate, as_int(yes).raw, as_int(no).raw))


def loop(start, stop, step, carry, body, rolled=False):
    machine = _now()
    before = machine.mask
    index, stop = as_int(start), as_int(stop)
    carry = list(carry)
    while (active := before & (index < stop)).any():
        machine.mask = active
        after = body(index, list(carry))
        carry = [select(active, new, old) for new, old in zip(after, carry, strict=True)]
        index = index + step
    machine.mask = before
    return carry


def barrier():
    machine = _now()
    reached = machine.mask.reshape(-1, machine.block_threads)
    if (reached.any(1) != reached.all(1)).any():
        raise AssertionError("a block barrier reached by part of the block")
    machine.block_epoch += machine.mask.any()


def cluster_barrier():
    machine = _now()
    if machine.mask.any() != machine.mask.all():
        raise AssertionError("a cluster barrier reached by part of the cluster")
    machine.cluster_epoch += machine.mask.all()


def store_remote(at, rank, *words):
    machine = _now()
    there = at.raw + (as_int(rank).raw.astype(np.int64) - machine.rank) * machine.shared_bytes
    store(Address(there, True), *words)


def warp_barrier():
    machine = _now()
    warps = machine.whole_warps("a warp barrier")
    machine.warp_epoch[warps] += 1
    machine.met[warps] = machine.events


def load(at, words: int = 1, offset: int = 0, kind: str = ""):
    data = _now().read(at.raw + offset, 4 * words).view(np.uint32)
    return [Int(data[:, i].copy()) for i in range(words)]


def load_float(at, words: int = 1, offset: int = 0, kind: str = ""):
    return [word.bits_as_float() for word in load(at, words, offset)]


def store(at, *words, offset: int = 0):
    data = np.stack([word.raw for word in words], -1).astype(np.uint32)
    _now().write(at.raw + offset, np.ascontiguousarray(data).view(np.uint8))


def store_float(at, *values, offset: int = 0):
    store(at, *[value.bits() for value in values], offset=offset)


def _tags_at(at, offset: int) -> np.ndarray:
    machine = _now()
    if machine.mask.any() and not machine.owners:
        raise AssertionError("words published in a kernel that is not resident")
    owners, machine.owners = machine.owners, {}
    words = machine.read(at.raw + offset, 8).view(np.uint32)
    machine.owners = owners
    return words


def publish(at, word, tag):
    machine = _now()
    if (machine.mask & (_tags_at(at, 0)[:, 1] == tag.raw)).any():
        raise AssertionError("a word published under a tag that its place carries already")
    machine.write(at.raw, np.ascontiguousarray(np.stack([word.raw, tag.raw], -1)).view(np.uint8))


def receive(at, tag, words: int = 1, pieces: int = 1, stride: int = 0):
    if (at.raw[_now().mask] % (8 * words)).any() or stride % (8 * words):
        raise AssertionError(f"runs of {words} published words not aligned to {8 * words} bytes")
    result = []
    for offset in (piece * stride + 8 * i for piece in range(pieces) for i in range(words)):
        found = _tags_at(at, offset)
        if (_now().mask & (found[:, 1] != tag.raw)).any():
            raise AssertionError("waiting for a word that is published later or never: would hang")
        result.append(Int(found[:, 0].copy()))
    return result


def _bf16_bits(x) -> np.ndarray:
    with np.errstate(all="ignore"):
        return x.raw.astype(ml_dtypes.bfloat16).view(np.uint16)


def store_bf16(at, value):
    _now().write(at.raw, np.ascontiguousarray(_bf16_bits(value)[:, None]).view(np.uint8))


def atomic_add(at, value):
    """Lanes in their order; a device's order is any."""
    machine = _now()
    value, before, mask = as_int(value), np.zeros(machine.threads, np.uint32), machine.mask
    for lane in np.flatnonzero(mask):
        machine.mask = np.arange(machine.threads) == lane
        for buffer, _, (offset,) in machine._locate(at.raw, 4):
            word = buffer[offset : offset + 4].view(np.uint32)
            before[lane] = word[0]
            word += value.raw[lane]
            if buffer is machine.shared:
                machine._mark(np.array([lane]), np.array([[offset // 4]]))
    machine.mask = mask
    return Int(before)


def add_to(at, value):
    atomic_add(at, value)


def copy16(destination, source, present):
    _copy(destination, source, 16, present)


def copy_word(destination, source, words: int = 1):
    _copy(destination, source, 4 * words, _now().mask)


def _copy(destination, source, nbytes: int, present):
    machine = _now()
    with when(present):
        data = machine.read(source.raw, nbytes)
    lanes = np.flatnonzero(machine.mask)
    places = (destination.raw[lanes] & ((1 << _SPACE) - 1))[:, None] + np.arange(nbytes)
    if (places[:, 0] % nbytes).any() or (places >= machine.shared.size).any():
        raise AssertionError(f"copies of {nbytes} bytes to {places[:, 0]}")
    machine.check_overwrite(lanes, places[:, ::4] // 4)
    machine.incoming[places[:, ::4] // 4] += 1
    machine.shared[places] = 0xFF
    machine.copies[-1].append((lanes, places, data[lanes]))


def copies_commit():
    # One list of groups for all lanes: exact as long as the lanes close their groups together, as they do here.
    if _now().mask.any():
        _now().copies.append([])


def copies_wait(pending: int):
    machine = _now()
    done = max(0, len(machine.copies) - 1 - pending)
    if machine.mask.any():
        machine.finish_copies(machine.copies[:done])
        machine.copies = machine.copies[done:]


def load_matrices(at, transposed: bool = False):
    machine = _now()
    machine.whole_warps("a matrix load")
    rows = machine.read(at.raw, 16).view(np.uint16).reshape(-1, 4, 8, 8)  # warp, matrix, row, column
    if transposed:
        rows = rows.swapaxes(2, 3)
    words = np.ascontiguousarray(rows).view(np.uint32)  # warp, matrix, g, q
    return [Int(words[:, i].reshape(-1)) for i in range(4)]


def transpose_pairs(x):
    _now().whole_warps("a matrix transposition")
    matrix = x.raw.reshape(-1, 8, 4).view(np.uint16).reshape(-1, 8, 8)
    return Int(np.ascontiguousarray(matrix.swapaxes(1, 2)).view(np.uint32).reshape(-1))


def fma(a, b, c):
    a, b, c = (as_float(x).raw.astype(np.float64) for x in (a, b, c))
    with np.errstate(all="ignore"):
        return Float(a * b + c)


def _unary(function):
    def apply(x):
        with np.errstate(all="ignore"):
            return Float(function(x.raw.astype(np.float64)))

    return apply


exp2 = _unary(np.exp2)
log2 = _unary(np.log2)
rsqrt = _unary(lambda x: 1 / np.sqrt(x))
reciprocal = _unary(lambda x: 1 / x)


def to_float(x):
    return Float(x.raw.astype(np.float32))


def divide(a, b):
    return as_float(a)._with(np.divide, b)


def bf16_pair(word):
    return (word << 16).bits_as_float(), (word & 0xFFFF0000).bits_as_float()


def _join(low, high):
    return Int(low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16)))


def to_bf16_pair(low, high):
    return _join(_bf16_bits(low), _bf16_bits(high))


def to_f16_pair(low, high):
    with np.errstate(all="ignore"):
        return _join(*(x.raw.astype(np.float16).view(np.uint16) for x in (low, high)))


def round_bf16(x):
    return Float(_bf16_bits(x).view(ml_dtypes.bfloat16).astype(np.float32))


def _e4m3(word) -> np.ndarray:
    return word.raw[:, None].view(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def e4m3_quad(word):
    values = _e4m3(word)
    return [Float(values[:, i]) for i in range(4)]


def e4m3_quad_broadcast(word):
    return [to_f16_pair(value, value) for value in e4m3_quad(word)]


def _halves(word, dtype) -> np.ndarray:
    return np.ascontiguousarray(word.raw)[:, None].view(np.uint16).view(dtype)


def multiply_f16_pair(a, b):
    product = _halves(a, np.float16) * _halves(b, np.float16)
    return Int(np.ascontiguousarray(product).view(np.uint32)[:, 0])


def shuffle_xor(x, distance: int):
    _now().whole_warps("a shuffle")
    return type(x)(x.raw[np.arange(x.raw.size) ^ distance])


def shuffle_xor_int(x, distance: int):
    return shuffle_xor(x, distance)


def rotate_left(x, by):
    by = as_int(by) & 31
    return (x << by) | (x >> ((32 - by) & 31))


def sum_lanes(x, distances):
    for distance in distances:
        x = x + shuffle_xor(x, distance)
    return x


def warp_total(x):
    _now().whole_warps("a warp sum")
    return Int(np.repeat(x.raw.reshape(-1, 32).sum(1, dtype=np.uint32), 32))


def warp_maximum(x):
    _now().whole_warps("a warp maximum")
    return Int(np.repeat(x.raw.reshape(-1, 32).max(1), 32))


def mma(kind: str, c, a, b):
    _now().whole_warps("a tensor-core product")
    dtype = np.float16 if kind == "f16" else ml_dtypes.bfloat16
    read = lambda word: _halves(word, dtype).astype(np.float64).reshape(-1, 8, 4, 2)  # noqa: E731 - warp, g, q, pair
    left = np.stack([np.stack([read(a[h + 2 * k]) for k in range(2)], 3) for h in range(2)], 1)  # w h g q k pair
    left = left.transpose(0, 1, 2, 4, 3, 5).reshape(-1, 16, 16)
    right = np.stack([read(word) for word in b], 2)  # warp, column g, k, q, pair
    right = right.reshape(-1, 8, 16)
    with np.errstate(all="ignore"):
        product = np.einsum("wrk,wck->wrc", left, right).reshape(-1, 2, 8, 4, 2)  # w h g q column
        order = [(0, 0), (0, 1), (1, 0), (1, 1)]
        return [
            Float(c[i].raw.astype(np.float64) + product[:, h, :, :, e].reshape(-1)) for i, (h, e) in enumerate(order)
        ]


class _Pending(Float):
    """A sum that is not there yet: NaN until ``group_wait``."""

    def __init__(self, value):
        super().__init__(np.full(value.shape, np.nan, np.float32))
        self.value = value


def multiply_group(wide: bool, c, a, at, *, columns: int, leading: int = 0):
    if not wide:
        return emit.multiply_warps(c, a, at, columns=columns, leading=leading)
    machine = _now()
    machine.whole_warps("a product of four warps")
    groups = machine.mask.reshape(-1, 128)
    if (groups.any(1) != groups.all(1)).any():
        raise AssertionError("a product of four warps reached by part of them")
    dtype = ml_dtypes.bfloat16
    read = lambda word: _halves(word, dtype).astype(np.float32).reshape(-1, 8, 4, 2)  # noqa: E731 - warp, g, q, pair
    left = np.stack([np.stack([read(a[h + 2 * k]) for k in range(2)], 3) for h in range(2)], 1)
    left = left.transpose(0, 1, 2, 4, 3, 5).reshape(-1, 64, 16)  # the rows of four warps
    n, k = np.meshgrid(np.arange(columns), np.arange(16), indexing="ij")
    if leading:
        linear = (n // 64) * leading + (k // 8) * 1024 + (k % 8) * 128 + (n % 64) * 2
    else:
        linear = (n // 8) * 1024 + (n % 8) * 128 + k * 2
    right = np.zeros((len(groups), columns, 16), np.float32)
    for group in np.flatnonzero(groups.any(1)):
        starts = at.raw[128 * group : 128 * group + 128] & ((1 << _SPACE) - 1)
        if (starts != starts[0]).any():
            raise AssertionError("four warps multiply with different values")
        if starts[0] % 16 or (leading and starts[0] % 1024):
            raise AssertionError(f"values of a product at {starts[0]}")
        place = starts[0] + linear
        place = place ^ ((place >> 3) & 0x70)
        words = np.unique(place // 4)
        if machine.unfenced[words].any():
            raise AssertionError("a product reads what was written without a fence for it")
        for warp in range(4 * group, 4 * group + 4):
            machine._check_race(np.array([32 * warp]), words[None])
            machine._note_read(np.array([32 * warp]), words[None])
        machine.busy[words] += 1
        machine.products.setdefault(group, []).append(words)
        right[group] = machine.shared.view(dtype)[place // 2].astype(np.float32)
    with np.errstate(all="ignore"):
        product = np.einsum("grk,gck->grc", left, right).reshape(-1, 4, 2, 8, columns // 8, 4, 2)  # grp w h g tile q e
    result = []
    for tile in range(columns // 8):
        for h in range(2):
            for e in range(2):
                old = c[4 * tile + 2 * h + e]
                old = old.value if isinstance(old, _Pending) else old.raw
                result.append(_Pending(old + product[:, :, h, :, tile, :, e].reshape(-1)))
    return result


def group_wait(pending: int, c=(), wide: bool = True):
    if not wide:
        return list(c)
    machine = _now()
    for group in np.flatnonzero(machine.mask.reshape(-1, 128).any(1)):
        products = machine.products.get(group, [])
        while len(products) > pending:
            machine.busy[products.pop(0)] -= 1
    if pending and c:
        raise AssertionError("sums taken while products may be unfinished: wait for all of them")
    return [Float(value.value) if isinstance(value, _Pending) else value for value in c]


def async_fence():
    machine = _now()
    machine.unfenced[np.isin(machine.writer, np.flatnonzero(machine.mask))] = False


def store_matrices(at, words):
    machine = _now()
    machine.whole_warps("a matrix store")
    matrices = np.stack(
        [w.raw.reshape(-1, 8, 4).view(np.uint16).reshape(-1, 8, 8) for w in words], 1
    )  # warp i g column
    rows = np.ascontiguousarray(matrices.swapaxes(2, 3)).reshape(-1, 8)
    machine.write(at.raw, rows.view(np.uint8))


def permute_bytes(x, selector: int):
    data = np.concatenate([x.raw[:, None].view(np.uint8), np.zeros((x.raw.size, 4), np.uint8)], 1)
    picked = data[:, [selector >> (4 * i) & 7 for i in range(4)]]
    return Int(np.ascontiguousarray(picked).view(np.uint32)[:, 0])


def multiply_bf16_pair(a, b):
    product = [(_halves(x, ml_dtypes.bfloat16).astype(np.float64)) for x in (a, b)]
    rounded = (product[0] * product[1]).astype(np.float32).astype(ml_dtypes.bfloat16)
    return Int(np.ascontiguousarray(rounded).view(np.uint32)[:, 0])


def decode_codes(word):
    magnitude, sign = 0x0E000E00, 0x80008000
    return [
        word & (magnitude | sign),
        (word << 3) & (magnitude | sign),
        ((word << 6) & magnitude) | ((word << 1) & sign),
        ((word << 9) & magnitude) | ((word << 2) & sign),
    ]


def arrival_init(at):
    machine = _now()
    for lane in np.flatnonzero(machine.mask):
        machine.arrivals[int(at.raw[lane])] = 0
        machine.born[int(at.raw[lane])] = int(lane), machine.block_epoch, int(machine.warp_epoch[lane // 32])


def arrival_fence():
    pass


def _check_born(lane: int, place: int):
    """Whether this lane can know an arrival that another one made."""
    machine = _now()
    maker, block, warp = machine.born.get(place, (lane, 0, 0))
    same_warp = maker // 32 == lane // 32 and machine.warp_epoch[lane // 32] > warp
    if maker != lane and machine.block_epoch == block and not same_warp:
        raise AssertionError("an arrival used before a barrier after its making by another thread")


def _release(lane: int, place: int):
    machine = _now()
    machine.released[place] = (lane // 32, int(machine.met[lane // 32]), lane, machine.events)


def arrive(at):
    machine = _now()
    for lane in np.flatnonzero(machine.mask):
        _check_born(int(lane), int(at.raw[lane]))
        machine.arrivals[int(at.raw[lane])] += 1
        _release(int(lane), int(at.raw[lane]))


def bulk_copy(destination, source, nbytes: int, arrival, expected: int | None = None):
    machine = _now()
    for lane in np.flatnonzero(machine.mask):
        _check_born(int(lane), int(arrival.raw[lane]))
        space, start = divmod(int(source.raw[lane]), 1 << _SPACE)
        buffer = machine.buffers[space - 1]
        to = int(destination.raw[lane]) & ((1 << _SPACE) - 1)
        if start % 16 or to % 16 or nbytes % 16 or start + nbytes > buffer.size or to + nbytes > machine.shared.size:
            raise AssertionError(f"bulk copy of {nbytes} bytes from {start} to {to}")
        words = np.arange(to // 4, (to + nbytes) // 4)[None]
        machine.check_overwrite(np.array([lane]), words)
        machine.shared[to : to + nbytes] = 0xFF  # until somebody has waited for it
        machine.writer[to // 4 : (to + nbytes) // 4] = -1
        place = int(arrival.raw[lane])
        machine.flying.setdefault(place, []).append((to, buffer[start : start + nbytes].copy()))
        machine.missing[place] = machine.missing.get(place, 0) + (nbytes if expected is None else expected) - nbytes
        machine.arrivals[place] += expected != 0
        if expected != 0:
            _release(int(lane), place)


def arrival_wait(at, parity):
    machine = _now()
    parity = as_int(parity)
    for lane in np.flatnonzero(machine.mask):
        done = machine.arrivals[int(at.raw[lane])]
        if machine.missing.get(int(at.raw[lane]), 0):
            raise AssertionError(f"{machine.missing[int(at.raw[lane])]} bytes announced and not copied: would hang")
        if done == 0 or (done - 1) & 1 != parity.raw[lane]:
            raise AssertionError(f"waiting for parity {parity.raw[lane]} after {done} copies: would hang or run ahead")
        _check_born(int(lane), int(at.raw[lane]))
        for to, data in machine.flying.pop(int(at.raw[lane]), ()):
            machine.shared[to : to + data.size] = data
        if int(at.raw[lane]) in machine.released:
            known = machine.knows.setdefault(int(lane) // 32, [])
            if machine.released[int(at.raw[lane])] not in known:
                known.append(machine.released[int(at.raw[lane])])


_NAMES = [
    name
    for name in list(globals())
    if not name.startswith("_") and hasattr(emit, name) and name not in ("annotations",)
]


@contextlib.contextmanager
def active() -> Iterator[None]:
    """Within the block, kernels built from ``emit`` run here: numpy in, numpy out."""
    own = {name: globals()[name] for name in _NAMES if callable(globals()[name])}
    saved = {name: getattr(emit, name) for name in own}
    for name, value in own.items():
        setattr(emit, name, value)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(emit, name, value)
