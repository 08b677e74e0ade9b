"""The emulator must notice the mistakes it is there for."""

import functools

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


def test_a_read_before_the_wait_for_a_copy_is_nan():
    def program(wait):
        def body(x, out, shared):
            lane = emit.Lane()
            emit.copy16(shared + lane.thread * 16, x + lane.thread * 16, lane.thread < 16)
            emit.copies_commit()
            if wait:
                emit.copies_wait(0)
            emit.store(out + lane.thread * 4, *emit.load(shared + lane.thread * 16))

        return body

    x = np.arange(512, dtype=np.float32)
    expected = np.where(np.arange(128) < 16, x[::4], 0)
    np.testing.assert_array_equal(run(program(True), x, shared=(2048,)), expected)
    assert np.isnan(run(program(False), x, shared=(2048,))).all()


def test_a_copy_needs_a_barrier_before_other_lanes_read_it():
    def program(x, out, shared):
        lane = emit.Lane()
        emit.copy16(shared + lane.thread * 16, x + lane.thread * 16, lane.thread < 128)
        emit.copies_commit()
        emit.copies_wait(0)
        emit.load(shared + (lane.thread ^ 1) * 16)

    with pytest.raises(AssertionError, match="before a barrier"):
        run(program, np.zeros(512, np.float32), shared=(2048,))


@pytest.mark.parametrize("transposed", [False, True])
def test_matrix_loads_and_transpositions(transposed):
    matrices = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)

    def program(x, out, shared):
        lane = emit.Lane()
        emit.copy16(shared + lane.thread * 16, x + lane.lane * 16, lane.warp.equals(0))
        emit.copies_commit()
        emit.copies_wait(0)
        emit.barrier()
        with emit.when(lane.warp.equals(0)):
            for i, word in enumerate(emit.load_matrices(shared + lane.lane * 16, transposed)):
                emit.store(out + lane.lane * 4, emit.transpose_pairs(word) if i == 3 else word, offset=128 * i)

    expected = matrices.swapaxes(1, 2).copy() if transposed else matrices.copy()
    expected[3] = expected[3].T
    out = run(program, matrices, shared=(2048,)).view(np.uint16).reshape(4, 8, 8)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("synchronise", [True, False])
def test_shared_memory_of_a_cluster(synchronise):
    """Each of four blocks sends its number to the next one; without the barrier that is a race."""

    def program(out, shared):
        lane, block = emit.Lane(), emit.block_index()
        emit.store_remote(shared + lane.thread * 4, (block + 1) & 3, block)
        if synchronise:
            emit.cluster_barrier()
        emit.store(out + (block * 128 + lane.thread) * 4, *emit.load(shared + lane.thread * 4))

    def execute():
        with emulate.active():
            out = [jax.ShapeDtypeStruct((4, 128), jnp.int32)]
            return emit.kernel(program, name="test", out=out, shared=[512], grid=4, warps=4, cluster=4)()[0]

    if synchronise:
        np.testing.assert_array_equal(execute()[:, 0], [3, 0, 1, 2])
    else:
        with pytest.raises(AssertionError, match="before a barrier"):
            execute()


def test_inputs_written_in_place_come_back_and_leave_the_callers_array_alone():
    def program(x, out, shared):
        emit.store(x + emit.Lane().thread * 4, emit.Int(7))

    x = np.zeros(128, np.int32)
    with emulate.active():
        results = emit.kernel(program, name="test", out=OUT, shared=[4], grid=1, warps=4, in_place=1)(x)
    assert (results[1] == 7).all()
    assert not x.any()


@pytest.mark.parametrize(
    ("order", "message"), [("arrive", None), ("late", "before a barrier"), ("lane", "before a barrier")]
)
def test_an_arrival_hands_over_what_its_warp_wrote(order, message):
    """What the warp wrote before a warp barrier before it; not what came later, nor other lanes' without it."""

    def program(x, out, shared, arrival):
        lane = emit.Lane()
        with emit.when(lane.thread.equals(0)):
            emit.arrival_init(arrival)
        emit.barrier()
        with emit.when(lane.warp.equals(0)):
            if order != "late":
                emit.store(shared + lane.lane * 4, lane.lane)
            if order != "lane":
                emit.warp_barrier()
            with emit.when(lane.lane.equals(0)):
                emit.arrive(arrival)
            if order == "late":
                emit.store(shared + lane.lane * 4, lane.lane)
        with emit.when(lane.warp.equals(1)):
            emit.arrival_wait(arrival, 0)
            emit.store(out + lane.lane * 4, *emit.load(shared + lane.lane * 4))

    x = np.zeros(64, np.float32)
    if message is None:
        found = run(program, x, shared=(512, 8))
        np.testing.assert_array_equal(found.view(np.uint32)[:32], np.arange(32))
    else:
        with pytest.raises(AssertionError, match=message):
            run(program, x, shared=(512, 8))


# -- words from block to block ---------------------------------------------------------------------------------------


def neighbours(body, resident=True):
    """``body(lane, block, exchange, out)`` in four blocks; the exchange buffer holds 1 and 2 everywhere."""

    def program(exchange, out, shared):
        body(emit.Lane(), emit.block_index(), exchange, out)

    out = [jax.ShapeDtypeStruct((4, 128), jnp.int32)]
    exchange = np.tile(np.array([1, 2], np.int32), 512)
    with emulate.active():
        make = functools.partial(emit.kernel, name="test", out=out, shared=[4], grid=4, warps=4)
        return make(program, in_place=1, resident=resident)(exchange)[0]


def place(exchange, lane, block):
    return exchange + (block * 1024 + lane.thread * 8)


def test_blocks_exchange_words():
    def body(lane, block, exchange, out):
        emit.publish(place(exchange, lane, block), block * 10, emit.Int(3))
        at = exchange + (((block + 1) & 3) * 1024 + (lane.thread & 63) * 16)
        first, second = emit.receive(at, emit.Int(3), words=2)
        emit.store(out + (block * 512 + lane.thread * 4), first + second)

    np.testing.assert_array_equal(neighbours(body)[:, 5], [20, 40, 60, 0])


def test_a_word_published_later_or_never_is_noticed():
    def body(lane, block, exchange, out):
        emit.receive(place(exchange, lane, block), emit.Int(3))
        emit.publish(place(exchange, lane, block), block, emit.Int(3))

    with pytest.raises(AssertionError, match="would hang"):
        neighbours(body)


def test_a_tag_that_is_there_already_is_noticed():
    with pytest.raises(AssertionError, match="carries already"):
        neighbours(lambda lane, block, exchange, out: emit.publish(place(exchange, lane, block), block, emit.Int(2)))


def test_reading_what_another_block_wrote_is_noticed():
    def body(lane, block, exchange, out):
        emit.store(out + (block * 512 + lane.thread * 4), block)
        emit.load(out + (((block + 1) & 3) * 512 + lane.thread * 4))

    with pytest.raises(AssertionError, match="another block"):
        neighbours(body)


def test_publishing_in_a_kernel_whose_blocks_run_apart_is_noticed():
    with pytest.raises(AssertionError, match="not resident"):
        neighbours(lambda lane, block, exchange, out: emit.publish(exchange, block, emit.Int(3)), resident=False)


@pytest.mark.parametrize(("expected", "message"), [(256, None), (512, "256 bytes announced"), (0, "would hang")])
def test_copies_that_complete_together(expected, message):
    def program(x, out, shared, arrival):
        with emit.when(emit.Lane().thread.equals(0)):
            emit.arrival_init(arrival)
            emit.bulk_copy(shared, x, 128, arrival, expected)
            emit.bulk_copy(shared + 128, x + 128, 128, arrival, 0)
        emit.barrier()
        emit.arrival_wait(arrival, 0)

    x = np.zeros(64, np.float32)
    if message is None:
        run(program, x, shared=(512, 8))
    else:
        with pytest.raises(AssertionError, match=message):
            run(program, x, shared=(512, 8))
