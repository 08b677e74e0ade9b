"""A small vocabulary for Mosaic GPU kernels written per lane: integers, floats, addresses, tensor-core products.

Pallas gives each kernel here its references and its grid; the body is emitted inside ``plgpu.inline_mgpu`` with "Lane"
semantics, where every value is one scalar per CUDA thread. That is what lets a warp own a private ring of weights,
place every load before the wait for its input, and feed ``mma.sync`` from registers: things that warpgroup-wide arrays
cannot say. All arithmetic is LLVM; inline PTX appears only where LLVM has no instruction for it.

Rule learnt on the device: inline PTX that synchronises threads must be ``convergent``. Otherwise LLVM may copy a
``bar.sync`` into both arms of a neighbouring branch, and the kernel hangs the GPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.mosaic.gpu import core, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from pallas_kernels.dispatch import KernelUnsupported

# Weights: read once, in long runs. They leave the L2 cache first, so that a step's gigabyte of them does not push out
# what every step reads again: norm weights, scales, the kernels' own code.
STREAM = "ld.global.L1::no_allocate.L2::cache_hint.L2::256B"
CACHED = "ld.global"
COHERENT = "ld.relaxed.gpu.global"  # what another block of the same launch wrote
_EVICT_FIRST = "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"  # a constant by the time it runs


OFF: set[str] = set()  # beginnings of the names of kernels that must not run; see ``selfcheck``


def _i32():
    return ir.IntegerType.get_signless(32)


def _i64():
    return ir.IntegerType.get_signless(64)


def _f32():
    return ir.F32Type.get()


def ptx(text: str, *operands, results=None, volatile: bool = False, convergent: bool = False):
    """Inline PTX over raw values; ``$0...`` are the results, then the operands."""
    raw = [op.raw if isinstance(op, (Int, Float, Address)) else op for op in operands]
    return utils.inline_ptx(
        text, *raw, result_types=results, has_side_effects=volatile or results is None, convergent=convergent
    )


class Int:
    """An unsigned 32-bit integer per lane. Operators take Python ints; comparisons give a predicate (raw i1)."""

    __slots__ = ("raw",)

    def __init__(self, value):
        self.raw = (
            mosaic.c(value - (1 << 32) if value >= 1 << 31 else value, _i32()) if isinstance(value, int) else value
        )

    def _with(self, op, other) -> Int:
        return Int(op(self.raw, as_int(other).raw))

    def __add__(self, other):
        return self._with(arith.addi, other)

    __radd__ = __add__

    def __sub__(self, other):
        return self._with(arith.subi, other)

    def __rsub__(self, other):
        return as_int(other) - self

    def __mul__(self, other):
        return self._with(arith.muli, other)

    __rmul__ = __mul__

    def __floordiv__(self, other):
        return self._with(arith.divui, other)

    def __mod__(self, other):
        return self._with(arith.remui, other)

    def __and__(self, other):
        return self._with(arith.andi, other)

    def __or__(self, other):
        return self._with(arith.ori, other)

    def __xor__(self, other):
        return self._with(arith.xori, other)

    def __lshift__(self, other):
        return self._with(arith.shli, other)

    def __rshift__(self, other):
        return self._with(arith.shrui, other)

    def _compare(self, predicate, other):
        return arith.cmpi(predicate, self.raw, as_int(other).raw)

    def __lt__(self, other):
        return self._compare(arith.CmpIPredicate.ult, other)

    def __ge__(self, other):
        return self._compare(arith.CmpIPredicate.uge, other)

    def equals(self, other):
        """Predicate: equal."""
        return self._compare(arith.CmpIPredicate.eq, other)

    def maximum(self, other) -> Int:
        return self._with(arith.maxui, other)

    def minimum(self, other) -> Int:
        return self._with(arith.minui, other)

    def bits_as_float(self) -> Float:
        return Float(arith.bitcast(_f32(), self.raw))


class Float:
    """A float32 per lane."""

    __slots__ = ("raw",)

    def __init__(self, value):
        self.raw = mosaic.c(float(value), _f32()) if isinstance(value, (int, float)) else value

    def _with(self, op, other) -> Float:
        return Float(op(self.raw, as_float(other).raw))

    def __add__(self, other):
        return self._with(arith.addf, other)

    __radd__ = __add__

    def __sub__(self, other):
        return self._with(arith.subf, other)

    def __mul__(self, other):
        return self._with(arith.mulf, other)

    __rmul__ = __mul__

    def __gt__(self, other):
        return arith.cmpf(arith.CmpFPredicate.OGT, self.raw, as_float(other).raw)

    def __ge__(self, other):
        return arith.cmpf(arith.CmpFPredicate.OGE, self.raw, as_float(other).raw)

    def maximum(self, other, nan: bool = False) -> Float:
        """The larger one; of a number and a NaN the number, or the NaN when ``nan``."""
        kind = "max.NaN.f32" if nan else "max.f32"
        return Float(ptx(f"{kind} $0, $1, $2;", self, as_float(other), results=_f32()))

    def bits(self) -> Int:
        return Int(arith.bitcast(_i32(), self.raw))


class Address:
    """A byte address: 64 bits in global memory, 32 bits in shared memory."""

    __slots__ = ("raw", "shared")

    def __init__(self, raw, shared: bool):
        self.raw, self.shared = raw, shared

    def __add__(self, offset) -> Address:
        """Advance by bytes (int or Int below 2^32)."""
        if isinstance(offset, int) and offset == 0:
            return self
        if self.shared:
            return Address(arith.addi(self.raw, as_int(offset).raw), True)
        wide = mosaic.c(offset, _i64()) if isinstance(offset, int) else arith.extui(_i64(), offset.raw)
        return Address(arith.addi(self.raw, wide), False)

    def __and__(self, mask) -> Int:
        """Bits of a shared address."""
        return Int(self.raw) & mask

    def __rshift__(self, by) -> Int:
        return Int(self.raw) >> by

    def __xor__(self, bits) -> Address:
        """A shared address with bits exchanged."""
        return Address((Int(self.raw) ^ bits).raw, True)

    def index(self, index, stride: int) -> Address:
        """Advance by index * stride bytes, computed in 64 bits for global memory (stacks exceed 4 GiB)."""
        if self.shared:
            return self + as_int(index) * stride
        wide = arith.muli(arith.extui(_i64(), as_int(index).raw), mosaic.c(stride, _i64()))
        return Address(arith.addi(self.raw, wide), False)


def as_int(value) -> Int:
    return value if isinstance(value, Int) else Int(value)


def as_float(value) -> Float:
    return value if isinstance(value, Float) else Float(value)


# -- kernels -------------------------------------------------------------------------------------------------------


def kernel(
    program: Callable,
    *,
    name: str,
    out: Sequence,
    shared: Sequence[int],
    grid: int,
    warps: int,
    in_place: int = 0,
    cluster: int = 1,
    resident: bool = False,
) -> Callable:
    """A jitted function (inputs...) -> list of ``out`` that runs ``program`` in ``grid`` blocks of ``warps`` warps.

    program(*addresses): the inputs' and outputs' starts in global memory, then those of the ``shared`` areas, whose
    sizes are given in bytes. warps: a multiple of 4. in_place: so many of the last inputs are written by the program
    and returned after ``out``; XLA copies them first unless nothing else needs the old values. cluster: so many
    consecutive blocks run at the same time and can write each other's shared memory; divides ``grid``. resident: the
    program waits for words from other blocks (``receive``), so all of them must run at the same time: that holds when
    ``grid`` is at most the device's number of cores, which the caller checks, as a core always takes at least one.
    """
    if name.startswith(tuple(OFF)):
        raise KernelUnsupported(f"{name} is switched off on this device (see the check of the kernels)")

    def body(*refs):
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))(lower)(*refs)

    def lower(_, *refs):
        split = len(refs) - len(shared)
        wide = [Address(llvm.ptrtoint(_i64(), utils.memref_ptr(ref)), False) for ref in refs[:split]]
        near = [Address(llvm.ptrtoint(_i32(), utils.memref_ptr(ref)), True) for ref in refs[split:]]
        program(*wide, *near)

    body.__name__ = name
    call = plgpu.kernel(
        body,
        out_type=list(out),
        scratch_types=[plgpu.SMEM((-(-nbytes // 4),), jnp.int32) for nbytes in shared],
        grid=(grid // cluster,),
        grid_names=("block",),
        **({"cluster": (cluster,), "cluster_names": ("rank",)} if cluster > 1 else {}),
        num_threads=warps // 4,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )
    if not in_place:
        return jax.jit(call)

    def run(*inputs):
        refs = [jax.new_ref(x) for x in inputs[-in_place:]]
        results = call(*inputs[:-in_place], *refs)
        return [*results, *(jax.freeze(ref) for ref in refs)]

    return jax.jit(run)


def index_operand(*indices) -> jax.Array:
    """Layer indices (Python ints or int32 scalars) as a small int32 array for a kernel to read.

    The last two entries are never read: XLA computes an array of equal constants, or one like [0, -1] or [0, 1, 2], in
    a kernel of its own, at every call; any other it stores in the program.
    """
    if all(isinstance(i, int) for i in indices):
        return jnp.asarray(np.array([*indices, -1, -1], np.int32))
    return jnp.stack([jnp.asarray(i, jnp.int32) for i in (*indices, -1, -1)])


# Off: a sliced operand makes each launch a dynamic-slice fusion, and the host then needs 1.99 ms for a step of 324
# launches instead of 1.27 (H200, jax 0.11.2, one run of both), while the kernels gain 0.03 ms together.
SLICES = False
SLICE_BYTES = 256  # XLA passes a slice to a kernel as an address, without a copy, when it begins at a multiple of these


def slice_layer(layer, *stacks):
    """(the stacks cut down to ``layer``, True) when that costs nothing, else (the stacks as they are, False).

    A kernel that reads its layer's number from memory cannot request a weight before that trip to memory is over, 0.5
    us; one that gets the layer's own address can. Free are whole stacks of one and, with SLICES on, slices at a number
    known at trace time whose size is a multiple of 256 bytes.
    """
    if all(stack.shape[0] == 1 for stack in stacks):
        return stacks, True
    aligned = all(stack.nbytes // stack.shape[0] % SLICE_BYTES == 0 for stack in stacks)
    if not (SLICES and aligned and isinstance(layer, int)):
        return stacks, False
    return tuple(stack if stack.shape[0] == 1 else stack[layer : layer + 1] for stack in stacks), True


def _name_without_number() -> None:
    """Have equal kernels be equal bytes in every process, or XLA's compile cache never finds a program again.

    Mosaic numbers the kernels of a process in the order in which they are lowered (a name for its dumps, which it also
    writes into the module), and programs are lowered side by side.
    """
    serde = core._run_serde_pass

    def run(module, **options):
        module = serde(module, **options)
        if _DUMP_NAME in module.operation.attributes:
            del module.operation.attributes[_DUMP_NAME]
        return module

    core._run_serde_pass = run


_DUMP_NAME = "mosaic_gpu.dump_basename"
if hasattr(core, "_run_serde_pass"):  # not a public name; without it only the cache suffers
    _name_without_number()


def cached(builder: Callable) -> Callable:
    """Remember a kernel per (hashable) specification: equal kernels are traced and assembled once."""
    remembered = functools.lru_cache(maxsize=256)(lambda _, *key: builder(*key))
    return functools.wraps(builder)(lambda *key: remembered(kernel, *key))


# -- where am I ----------------------------------------------------------------------------------------------------


class Lane:
    """This thread's place: thread, warp (uniform), lane = 4 g + q."""

    def __init__(self):
        self.thread = Int(utils.thread_idx())
        self.warp = Int(utils.warp_idx(sync=True))
        self.lane = self.thread & 31
        self.g = self.lane >> 2
        self.q = self.lane & 3


def block_index() -> Int:
    """Which block of a one-dimensional grid."""
    return Int(utils.block_idx())


# -- control -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def when(predicate):
    """Lanes whose predicate holds run the body."""
    with utils.when(predicate):
        yield


def both(a, b):
    return arith.andi(a, b)


def either(a, b):
    return arith.ori(a, b)


def negate(a):
    return arith.xori(a, mosaic.c(1, ir.IntegerType.get_signless(1)))


def select(predicate, yes, no):
    """Int, Float or (two of the same memory) Address by predicate."""
    if isinstance(yes, Address):
        return Address(arith.select(predicate, yes.raw, no.raw), yes.shared)
    if isinstance(yes, Float) or isinstance(no, Float):
        return Float(arith.select(predicate, as_float(yes).raw, as_float(no).raw))
    return Int(arith.select(predicate, as_int(yes).raw, as_int(no).raw))


def loop(start, stop, step, carry: Sequence[Int | Float], body: Callable, rolled: bool = False) -> list:
    """``for i in range(start, stop, step): carry = body(i, carry)`` with Int and Float carried values.

    rolled: keep the machine code to one copy of the body, for what runs once and pays for every byte of it.
    """
    kinds = [type(value) for value in carry]
    if rolled:  # a number that the compiler does not know
        stop = Int(ptx("mov.b32 $0, $1;", as_int(stop), results=_i32(), volatile=True))
    op = scf.ForOp(as_int(start).raw, as_int(stop).raw, as_int(step).raw, [value.raw for value in carry])
    with ir.InsertionPoint(op.body):
        if rolled:
            ptx('.pragma "nounroll";', convergent=True)  # the word for the assembler, convergence for LLVM
        inner = [kind(raw) for kind, raw in zip(kinds, op.inner_iter_args, strict=True)]
        scf.YieldOp([value.raw for value in body(Int(op.induction_variable), inner)])
    return [kind(raw) for kind, raw in zip(kinds, op.results, strict=True)]


def barrier() -> None:
    """All threads of the block; shared memory written before is visible after."""
    ptx("bar.sync 0;", convergent=True)


def warp_barrier() -> None:
    ptx("bar.warp.sync 0xffffffff;", convergent=True)


# -- memory --------------------------------------------------------------------------------------------------------


def load(at: Address, words: int = 1, offset: int = 0, kind: str = CACHED) -> list[Int]:
    """1, 2 or 4 aligned 32-bit words; ``offset`` in bytes. Never moved or merged by the compiler."""
    kind = "ld.shared" if at.shared else kind
    outputs = "$0" if words == 1 else "{" + ",".join(f"${i}" for i in range(words)) + "}"
    vector = "" if words == 1 else f".v{words}"
    text = f"{kind}{vector}.b32 {outputs}, [${words}+{offset}]"
    text = f"{{\n.reg .b64 policy;\n{_EVICT_FIRST}\n{text}, policy;\n}}" if kind == STREAM else f"{text};"
    results = ptx(text, at, results=_i32() if words == 1 else [_i32()] * words, volatile=True)
    return [Int(raw) for raw in ([results] if words == 1 else results)]


def load_float(at: Address, words: int = 1, offset: int = 0, kind: str = CACHED) -> list[Float]:
    return [word.bits_as_float() for word in load(at, words, offset, kind)]


def store(at: Address, *words: Int, offset: int = 0) -> None:
    """1, 2 or 4 aligned 32-bit words."""
    space = "st.shared" if at.shared else "st.global"
    if len(words) == 1:
        ptx(f"{space}.b32 [$0+{offset}], $1;", at, words[0])
        return
    inputs = ",".join(f"${i + 1}" for i in range(len(words)))
    ptx(f"{space}.v{len(words)}.b32 [$0+{offset}], {{{inputs}}};", at, *words)


def store_float(at: Address, *values: Float, offset: int = 0) -> None:
    store(at, *[value.bits() for value in values], offset=offset)


def store_bf16(at: Address, value: Float) -> None:
    """One rounded bfloat16."""
    space = "st.shared" if at.shared else "st.global"
    ptx(f"{{\n.reg .b16 h;\ncvt.rn.bf16.f32 h, $1;\n{space}.b16 [$0], h;\n}}", at, value)


def atomic_add(at: Address, value) -> Int:
    """Add to a word; gives what it held before. In global memory it orders the block: what the block's threads wrote
    before a barrier in front of it is seen by whoever reads behind a later addition of another block and a barrier."""
    kind = "atom.shared.add.u32" if at.shared else "atom.acq_rel.gpu.global.add.u32"
    return Int(ptx(f"{kind} $0, [$1], $2;", at, as_int(value), results=_i32(), volatile=True))


def add_to(at: Address, value) -> None:
    """Add to a word in global memory; nobody waits for it."""
    ptx("red.relaxed.gpu.global.add.u32 [$0], $1;", at, as_int(value))


def copy16(destination: Address, source: Address, present) -> None:
    """Each lane starts a copy of 16 bytes, global -> shared; zeros where its predicate ``present`` is false."""
    size = select(present, 16, 0)
    ptx("cp.async.cg.shared.global.L2::256B [$0], [$1], 16, $2;", destination, source, size)


def copy_word(destination: Address, source: Address, words: int = 1) -> None:
    """Each lane starts a copy of 1 or 2 aligned words, global -> shared."""
    ptx(f"cp.async.ca.shared.global [$0], [$1], {4 * words};", destination, source)


def copies_commit() -> None:
    """Close a group: the lane's copies since the last one."""
    ptx("cp.async.commit_group;")


def copies_wait(pending: int) -> None:
    """Wait until only the lane's newest ``pending`` groups may be incomplete; other lanes see them after a barrier."""
    ptx(f"cp.async.wait_group {pending};")


def load_matrices(at: Address, transposed: bool = False) -> list[Int]:
    """Four 8 x 8 matrices of 16-bit values from shared memory; lane 8 i + r points at row r of matrix i.

    Word i of lane (g, q) is row g, columns 2q and 2q + 1 of matrix i (of its transpose).
    """
    kind = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {{$0,$1,$2,$3}}, [$4];"
    return [Int(raw) for raw in ptx(text, at, results=[_i32()] * 4, volatile=True, convergent=True)]


# -- clusters of blocks ----------------------------------------------------------------------------------------------


def cluster_barrier() -> None:
    """All threads of the cluster; memory written before, also another block's shared memory, is visible after."""
    ptx("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;", convergent=True)


def store_remote(at: Address, rank: Int, *words: Int) -> None:
    """1, 2 or 4 words into the shared memory of block ``rank`` of the cluster, at the place ``at`` has in this one."""
    kind = "" if len(words) == 1 else f".v{len(words)}"
    inputs = ",".join(f"${i + 2}" for i in range(len(words)))
    ptx(
        f"{{\n.reg .b32 far;\nmapa.shared::cluster.u32 far, $0, $1;\n"
        f"st.shared::cluster{kind}.b32 [far], {{{inputs}}};\n}}",
        at,
        as_int(rank),
        *words,
    )


# -- words from block to block of one launch (kernels with ``resident``) --------------------------------------------


def publish(at: Address, word: Int, tag: Int) -> None:
    """Store a word and its tag at a multiple of 8 bytes in global memory, as one access that cannot be torn."""
    ptx("{\n.reg .b64 both;\nmov.b64 both, {$1, $2};\nst.relaxed.gpu.global.b64 [$0], both;\n}", at, word, tag)


def receive(at: Address, tag: Int, words: int = 1, pieces: int = 1, stride: int = 0) -> list[Int]:
    """Wait until ``pieces`` runs of ``words`` (1 or 2) published words, ``stride`` bytes apart, all carry ``tag``.

    A run begins at a multiple of 8 x words bytes. The lanes of a warp leave the wait one by one: a warp barrier must
    follow before anything that takes the whole warp. No fence is needed, as a word arrives together with its tag.
    """
    count = words * pieces
    pair = [f"{{w{i}, t{i}}}" for i in range(count)]
    text = "{\n.reg .pred other;\n" + "".join(f".reg .b64 b{i}; .reg .b32 w{i}, t{i};\n" for i in range(count))
    text += "AGAIN:\n"
    for piece in range(pieces):
        at_once = ", ".join(f"b{piece * words + i}" for i in range(words))
        vector, into = ("", at_once) if words == 1 else (".v2", f"{{{at_once}}}")
        text += f"ld.relaxed.gpu.global{vector}.b64 {into}, [${count}+{piece * stride}];\n"
    for i in range(count):
        text += f"mov.b64 {pair[i]}, b{i};\nsetp.ne.u32 other, t{i}, ${count + 1};\n@other bra AGAIN;\n"
    text += "".join(f"mov.b32 ${i}, w{i};\n" for i in range(count)) + "}"
    results = ptx(text, at, tag, results=_i32() if count == 1 else [_i32()] * count, volatile=True)
    return [Int(raw) for raw in ([results] if count == 1 else results)]


# -- numbers -------------------------------------------------------------------------------------------------------


def fma(a, b, c) -> Float:
    return Float(ptx("fma.rn.f32 $0, $1, $2, $3;", as_float(a), as_float(b), as_float(c), results=_f32()))


def exp2(x: Float) -> Float:
    """Hardware 2^x (relative error 2^-22), flushing subnormals."""
    return Float(ptx("ex2.approx.ftz.f32 $0, $1;", x, results=_f32()))


def log2(x: Float) -> Float:
    """Hardware base-2 logarithm: absolute error 2^-22 between 1/2 and 2, relative beyond; exact at 0 and 1."""
    return Float(ptx("lg2.approx.ftz.f32 $0, $1;", x, results=_f32()))


def to_float(x: Int) -> Float:
    """An unsigned integer, rounded to nearest even."""
    return Float(ptx("cvt.rn.f32.u32 $0, $1;", x, results=_f32()))


def rsqrt(x: Float) -> Float:
    """Hardware reciprocal square root, flushing subnormals."""
    return Float(ptx("rsqrt.approx.ftz.f32 $0, $1;", x, results=_f32()))


def reciprocal(x: Float) -> Float:
    """Hardware approximation (1 ulp)."""
    return Float(ptx("rcp.approx.ftz.f32 $0, $1;", x, results=_f32()))


def divide(a, b) -> Float:
    """IEEE division."""
    return Float(ptx("div.rn.f32 $0, $1, $2;", as_float(a), as_float(b), results=_f32()))


def bf16_pair(word: Int) -> tuple[Float, Float]:
    """Two bfloat16 in a word -> float32 (low half first)."""
    return (word << 16).bits_as_float(), (word & 0xFFFF0000).bits_as_float()


def to_bf16_pair(low: Float, high: Float) -> Int:
    """Two float32, rounded to nearest even -> a word."""
    return Int(ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", low, high, results=_i32()))


def to_f16_pair(low: Float, high: Float) -> Int:
    return Int(ptx("cvt.rn.f16x2.f32 $0, $2, $1;", low, high, results=_i32()))


def round_bf16(x: Float) -> Float:
    """bfloat16 rounding (nearest even), kept in float32."""
    return bf16_pair(to_bf16_pair(x, x))[0]


def e4m3_quad(word: Int) -> list[Float]:
    """Four E4M3 bytes -> float32, exact."""
    text = (
        "{\n.reg .b16 l,h,a,b,c,d; .reg .b32 u,v;\nmov.b32 {l,h}, $4;\n"
        "cvt.rn.f16x2.e4m3x2 u, l;\ncvt.rn.f16x2.e4m3x2 v, h;\nmov.b32 {a,b}, u;\nmov.b32 {c,d}, v;\n"
        "cvt.f32.f16 $0, a;\ncvt.f32.f16 $1, b;\ncvt.f32.f16 $2, c;\ncvt.f32.f16 $3, d;\n}"
    )
    return [Float(raw) for raw in ptx(text, word, results=[_f32()] * 4)]


def e4m3_quad_broadcast(word: Int) -> list[Int]:
    """Four E4M3 bytes -> four words, each the value twice in float16, exact."""
    text = (
        "{\n.reg .b16 l,h,a,b,c,d; .reg .b32 u,v;\nmov.b32 {l,h}, $4;\n"
        "cvt.rn.f16x2.e4m3x2 u, l;\ncvt.rn.f16x2.e4m3x2 v, h;\nmov.b32 {a,b}, u;\nmov.b32 {c,d}, v;\n"
        "mov.b32 $0, {a,a};\nmov.b32 $1, {b,b};\nmov.b32 $2, {c,c};\nmov.b32 $3, {d,d};\n}"
    )
    return [Int(raw) for raw in ptx(text, word, results=[_i32()] * 4)]


def multiply_f16_pair(a: Int, b: Int) -> Int:
    return Int(ptx("mul.rn.f16x2 $0, $1, $2;", a, b, results=_i32()))


# -- across lanes --------------------------------------------------------------------------------------------------


def shuffle_xor(x: Float, distance: int) -> Float:
    return Float(utils.shfl_bfly(x.raw, distance))


def shuffle_xor_int(x: Int, distance: int) -> Int:
    return Int(utils.shfl_bfly(x.raw, distance))


def rotate_left(x: Int, by) -> Int:
    """The word's bits moved up by the low five bits of ``by``, those that leave it coming back below."""
    return Int(ptx("shf.l.wrap.b32 $0, $1, $1, $2;", x, as_int(by), results=_i32()))


def sum_lanes(x: Float, distances: Sequence[int]) -> Float:
    """Butterfly sum over lanes that differ in these bits; every lane gets the (same) total."""
    for distance in distances:
        x = x + shuffle_xor(x, distance)
    return x


def transpose_pairs(x: Int) -> Int:
    """An 8 x 8 matrix of 16-bit values, row g in the lanes (g, q) as pairs of columns -> its transpose, same order."""
    return Int(ptx("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", x, results=_i32(), convergent=True))


def warp_total(x: Int) -> Int:
    """Unsigned sum over the warp."""
    return Int(ptx("redux.sync.add.u32 $0, $1, 0xffffffff;", x, results=_i32(), volatile=True, convergent=True))


def warp_maximum(x: Int) -> Int:
    """Unsigned maximum over the warp."""
    return Int(ptx("redux.sync.max.u32 $0, $1, 0xffffffff;", x, results=_i32(), volatile=True, convergent=True))


# -- tensor cores --------------------------------------------------------------------------------------------------


def mma(kind: str, c: Sequence[Float], a: Sequence[Int], b: Sequence[Int]) -> list[Float]:
    """m16n8k16: c [rows g, g, g+8, g+8; columns 2q, 2q+1] += a x b; kind "f16" or "bf16", float32 sums."""
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    return [Float(raw) for raw in ptx(text, *a, *b, *c, results=[_f32()] * 4, convergent=True)]


CODE_SCALE = 2.0**14  # ``decode_codes`` gives weight * 2^-14


def decode_codes(word: Int) -> list[Int]:
    """A code word of ``layout`` -> the A operand of one product: four float16 pairs, code * 2^-14, exact.

    11 integer instructions for 8 weights. Shifting the whole word is safe: bits that cross from the lower half into
    the upper one land below the masks.
    """
    magnitude, sign = 0x0E000E00, 0x80008000
    return [
        word & (magnitude | sign),
        (word << 3) & (magnitude | sign),
        ((word << 6) & magnitude) | ((word << 1) & sign),
        ((word << 9) & magnitude) | ((word << 2) & sign),
    ]


# -- products of four warps ------------------------------------------------------------------------------------------
#
# Four consecutive warps (a warpgroup, the first a multiple of four) multiply 64 x 16 weights, held in registers as the
# A operand of ``mma`` (warp w has rows 16 w to 16 w + 15), with 16 x n values in shared memory. There, values lie in
# rows of 128 bytes whose 16-byte pieces are exchanged by ``swizzled``; eight rows are 1,024 bytes and begin at a
# multiple of that. Hopper has an instruction for it (wgmma); other GPUs do the same by ``load_matrices`` and ``mma``.

ROW = 128  # bytes of a row of swizzled values


def swizzled(offset):
    """Where the byte at ``offset`` of rows of 128 bytes lies, relative to a multiple of 1,024 (int or Int)."""
    return offset ^ ((offset >> 3) & 0x70)


def multiply_group(
    wide: bool, c: Sequence[Float], a: Sequence[Int], at: Address, *, columns: int, leading: int = 0
) -> list[Float]:
    """c [4 floats for each 8 columns, as ``mma`` has them] += a x values; bfloat16, float32 sums. Four warps call it.

    wide: by wgmma, asynchronously: the sums are there after ``group_wait``, until which the values stay untouched.
    at: the first of 16 values along the sum. leading 0: a row of 128 bytes holds one column's values, 64 along the sum,
    and ``at`` lies 32 i bytes into the first row. Otherwise a row holds 64 columns at one place of the sum, ``at`` is a
    row divisible by 8, and the next 64 columns begin ``leading`` bytes on.
    """
    if not wide:
        return multiply_warps(c, a, at, columns=columns, leading=leading)
    count = columns // 2
    i64 = _i64()
    constant = ((leading >> 4) << 16) | ((8 * ROW >> 4) << 32) | (1 << 62)
    base = arith.extui(i64, ((at & 0x3FFFF) >> 4).raw)
    descriptor = arith.ori(base, mosaic.c(constant, i64))
    sums = ",".join(f"${i}" for i in range(count))
    first = 2 * count
    text = (
        "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.fence.sync.aligned;\n"
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{sums}}}, "
        f"{{${first},${first + 1},${first + 2},${first + 3}}}, ${first + 4}, p, 1, 1, {int(bool(leading))};\n"
        "wgmma.commit_group.sync.aligned;\n}"
    )
    return _tied(text, c, [*(word.raw for word in a), descriptor], "r,r,r,r,l")


def group_wait(pending: int, c: Sequence[Float] = (), wide: bool = True) -> list[Float]:
    """Wait until only the newest ``pending`` products of these warps may be unfinished; ``c``, if they are done."""
    if not wide:
        return list(c)
    return _tied(f"wgmma.wait_group.sync.aligned {pending};", c, [], "")


def _tied(text: str, values: Sequence[Float], operands: Sequence, constraints: str) -> list[Float]:
    """Inline PTX that updates float registers in place: ``$0...`` are the values, the operands follow twice as far."""
    n = len(values)
    spec = ",".join([*["=f"] * n, *map(str, range(n)), *([constraints] if constraints else []), "~{memory}"])
    result = llvm.StructType.get_literal([_f32()] * n) if n else None
    inputs = [value.raw for value in values] + list(operands)
    op = llvm.InlineAsmOp(result, inputs, text, spec, has_side_effects=True, asm_dialect=0, convergent=True)
    return [Float(llvm.extractvalue(_f32(), op.results[0], [i])) for i in range(n)]


def multiply_warps(c: Sequence[Float], a: Sequence[Int], at: Address, *, columns: int, leading: int = 0) -> list[Float]:
    """``multiply_group`` of each warp for itself."""
    lane = Lane().lane
    row, matrix = lane & 7, lane >> 3
    sums = list(c)
    for tile in range(0, columns // 8, 2):
        if leading:  # rows along the sum: matrix i has places 8 (i & 1) on, columns 8 (tile + i // 2) on
            column = (matrix >> 1) * 8 + 8 * tile
            linear = (at + (column >> 6) * leading) + ((matrix & 1) * 8 + row) * ROW + (column & 63) * 2
        else:
            linear = at + ((matrix >> 1) * 8 + row + 8 * tile) * ROW + (matrix & 1) * 16
        words = load_matrices(swizzled(linear), transposed=bool(leading))
        for half in range(2):
            if tile + half < columns // 8:
                place = 4 * (tile + half)
                sums[place : place + 4] = mma("bf16", sums[place : place + 4], a, words[2 * half : 2 * half + 2])
    return sums


def async_fence() -> None:
    """What this thread has in shared memory (copies that it waited for, stores) is there for wgmma after a barrier."""
    ptx("fence.proxy.async.shared::cta;")


def store_matrices(at: Address, words: Sequence[Int]) -> None:
    """The inverse of a transposed ``load_matrices``: lane 8 i + r points at row r of matrix i, which gets column r of
    the matrix whose row g lies in the lanes (g, q) of word i as pairs of columns."""
    ptx("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1,$2,$3,$4};", at, *words, convergent=True)


def permute_bytes(x: Int, selector: int) -> Int:
    """Bytes of x by the nibbles of ``selector``, lowest first; 4 gives zero."""
    return Int(ptx(f"prmt.b32 $0, $1, 0, 0x{selector:04x};", x, results=_i32()))


def multiply_bf16_pair(a: Int, b: Int) -> Int:
    """Products of two pairs, rounded to bfloat16; subnormals count."""
    return Int(ptx("mul.rn.bf16x2 $0, $1, $2;", a, b, results=_i32()))


def decode_codes_bf16(word: Int) -> list[Int]:
    """``decode_codes`` in bfloat16: code * 2^-126, exact (codes below 1 are subnormal)."""
    magnitude, sign = 0x01C001C0, 0x80008000
    return [
        ((word >> 3) & magnitude) | (word & sign),
        (word & magnitude) | ((word << 3) & sign),
        ((word << 3) & magnitude) | ((word << 1) & sign),
        ((word << 6) & magnitude) | ((word << 2) & sign),
    ]


WEIGHT_SCALE = 2.0**8  # undoes what ``decode_codes_bf16`` times ``e4m3_bf16`` leaves


def e4m3_bf16(word: Int) -> list[Int]:
    """Four E4M3 bytes without sign -> four words, each value * 2^118 twice in bfloat16, exact."""
    quad = []
    for byte in range(4):
        bits = permute_bytes(word, 0x4040 | byte << 8 | byte) << 4  # value * 2^-120
        quad.append(multiply_bf16_pair(multiply_bf16_pair(bits, Int(0x7B807B80)), Int(0x7A807A80)))
    return quad


# -- bulk copies into shared memory --------------------------------------------------------------------------------


def arrival_init(at: Address) -> None:
    """An mbarrier that one thread arrives at."""
    ptx("mbarrier.init.shared::cta.b64 [$0], 1;", at)


def arrival_fence() -> None:
    """Make initialised mbarriers visible to the copy engine."""
    ptx("fence.mbarrier_init.release.cluster;")


def bulk_copy(
    destination: Address, source: Address, nbytes: int, arrival: Address, expected: int | None = None
) -> None:
    """Global -> shared by the copy engine; one thread calls it; completion is counted on ``arrival``.

    Several copies that complete together: the first says how many bytes all of them bring (``expected``), the others 0.
    """
    expected = nbytes if expected is None else expected
    expect = f"mbarrier.arrive.expect_tx.shared::cta.b64 s, [$2], {expected};\n" if expected else ""
    ptx(
        f"{{\n.reg .b64 s, policy;\n{_EVICT_FIRST}\n{expect}"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [$0], [$1], "
        f"{nbytes}, [$2], policy;\n}}",
        destination,
        source,
        arrival,
    )


def arrive(at: Address) -> None:
    """One thread's own arrival: what it wrote before, and its warp before a warp barrier, is there for who waits."""
    ptx("{\n.reg .b64 s;\nmbarrier.arrive.shared::cta.b64 s, [$0];\n}", at)


def arrival_wait(at: Address, parity: Int) -> None:
    ptx(
        "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;\n@p bra DONE;\nbra WAIT;\n"
        "DONE:\n}",
        at,
        as_int(parity),
        convergent=True,
    )
