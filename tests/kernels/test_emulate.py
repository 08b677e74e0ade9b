"""The emulator must notice the mistakes it is there for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import emit, emulate

OUT = [jax.ShapeDtypeStruct((128,), jnp.float32)]


def run(program, *inputs, shared=(512,)):
    with emulate.active():
        return emit.kernel(program, name="test", out=OUT, shared=list(shared), grid=1, warps=4)(*inputs)[0]


def exchange(synchronise):
    def program(x, out, shared):
        lane = emit.Lane()
        emit.store(shared + lane.thread * 4, *emit.load(x + lane.thread * 4))
        synchronise()
        emit.store(out + lane.thread * 4, *emit.load(shared + (lane.thread ^ 64) * 4))

    return program


def test_an_exchange_through_shared_memory():
    x = np.arange(128, dtype=np.float32)
    np.testing.assert_array_equal(run(exchange(lambda: emit.barrier()), x), x[np.arange(128) ^ 64])


@pytest.mark.parametrize("synchronise", [lambda: None, lambda: emit.warp_barrier()])
def test_a_missing_barrier_is_noticed(synchronise):
    with pytest.raises(AssertionError, match="before a barrier"):
        run(exchange(synchronise), np.zeros(128, np.float32))


def test_a_divergent_barrier_is_noticed():
    def program(out, shared):
        with emit.when(emit.Lane().thread < 64):
            emit.barrier()

    with pytest.raises(AssertionError, match="part of the block"):
        run(program)


def test_a_divergent_shuffle_is_noticed():
    def program(out, shared):
        with emit.when(emit.Lane().lane < 16):
            emit.sum_lanes(emit.Float(1.0), (1,))

    with pytest.raises(AssertionError, match="part of a warp"):
        run(program)


def test_an_address_outside_its_buffer_is_noticed():
    with pytest.raises(AssertionError, match="in a buffer of 512"):
        run(lambda out, shared: emit.store(out + emit.Lane().thread * 4 + 4, emit.Int(0)))


def test_a_misaligned_address_is_noticed():
    with pytest.raises(AssertionError, match="aligned to 8"):
        run(lambda out, shared: emit.load(out + 4, 2))


def test_a_wait_without_a_copy_is_noticed():
    def program(out, shared):
        emit.arrival_init(shared + 0)
        emit.arrival_wait(shared + 0, 0)

    with pytest.raises(AssertionError, match="would hang"):
        run(program)


def test_a_product_is_the_matrix_product():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((16, 16)).astype(np.float16), rng.standard_normal((8, 16)).astype(np.float16)
    lane = np.arange(32)
    g, q = lane // 4, lane % 4
    pair = lambda m, row, column: np.ascontiguousarray(np.stack([m[row, column], m[row, column + 1]], -1)).view("<u4")  # noqa: E731
    operand_a = np.stack([pair(a, g + 8 * h, 2 * q + 8 * k)[:, 0] for k in range(2) for h in range(2)])
    operand_b = np.stack([pair(b, g, 2 * q + 8 * k)[:, 0] for k in range(2)])

    def program(a_in, b_in, out, shared):
        lane = emit.Lane()
        left = [emit.load(a_in + lane.lane * 4, offset=128 * i)[0] for i in range(4)]
        right = [emit.load(b_in + lane.lane * 4, offset=128 * i)[0] for i in range(2)]
        c = emit.mma("f16", [emit.Float(0.0)] * 4, left, right)
        with emit.when(lane.warp.equals(0)):
            for i, value in enumerate(c):
                row, column = lane.g + 8 * (i // 2), lane.q * 2 + i % 2
                emit.store_float(out + (row * 8 + column) * 4, value)

    out = run(program, operand_a, operand_b).reshape(16, 8)
    np.testing.assert_allclose(out, a.astype(np.float64) @ b.T.astype(np.float64), rtol=1e-6, atol=1e-6)
