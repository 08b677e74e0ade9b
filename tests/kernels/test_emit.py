"""What the kernels' vocabulary hands to the compiler."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import emit


@pytest.mark.parametrize("indices", [(0,), (1,), (46,), (0, 0), (1, 0), (0, 1), (2, 1), (5, 5)])
def test_an_index_operand_is_a_stored_constant(indices):
    """Anything computed (an iota, a broadcast) would be one more kernel in front of every kernel."""

    def program(x):
        return x + 1, emit.index_operand(*indices)

    text = jax.jit(program).lower(jnp.zeros(4, jnp.int32)).compile().as_text()
    assert f"constant({{{', '.join(map(str, (*indices, -1, -1)))}}})" in text
    assert "iota" not in text


def test_an_index_may_be_traced():
    assert jax.jit(emit.index_operand)(3, 4)[:2].tolist() == [3, 4]
