"""``info --memory``: what fits on a GPU, by arithmetic, and that it is the arithmetic of the server."""

import jax
import numpy as np
import pytest

from flint_jax import memory, memory_table, tiles
from flint_jax.__main__ import main
from flint_jax.errors import ConfigError
from flint_jax.numerics import Numerics
from flint_jax.random_weights import random_weights
from loaders.synthetic import preset, spread

FLINT = preset("full", 49)


@pytest.mark.parametrize("weight_format", ["nvfp4", "bf16"])
@pytest.mark.parametrize("tiled", [False, True])
def test_weights_take_what_the_device_holds(weight_format, tiled):
    numerics = Numerics("serving", "bfloat16")

    def make():
        tree = random_weights(FLINT, numerics, weight_format=weight_format, spread=spread)
        return tiles.tile_weights(tree) if tiled else tree

    leaves = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(make))]
    told, largest = memory_table.weight_bytes(FLINT, weight_format)
    rope = 4 * FLINT.max_position_embeddings * FLINT.head_dim
    np.testing.assert_allclose(told - rope, sum(leaves), rtol=1e-3)
    assert largest >= max(leaves)


@pytest.mark.parametrize(
    ("weight_format", "gib"), [("nvfp4", 48), ("nvfp4", 80), ("nvfp4", 140), ("bf16", 140), ("bf16", 180)]
)
def test_the_rows_add_up_to_no_more_than_the_share(weight_format, gib):
    text = memory_table.table(FLINT, weight_format, gib)
    rows = {line[:40].strip(): float(line[40:].split()[0]) for line in text.splitlines() if line.endswith("GiB")}
    parts = [size for name, size in rows.items() if not name.startswith(("the GPU", "kept", "free"))]
    assert sum(parts) <= gib * 0.9 + 0.03
    # All of it is used, or as much as finds room in one piece beside the hole that the largest stack leaves.
    pool = next(size for name, size in rows.items() if "pages" in name)
    snapshots = next(size for name, size in rows.items() if "snapshots" in name)
    largest = memory_table.weight_bytes(FLINT, weight_format)[1]
    piece = memory._in_one_piece(int(rows["free before the cache"] * 2**30), largest, int(snapshots * 2**30)) / 2**30
    assert sum(parts) > gib * 0.9 - 0.1 or abs(pool - piece) < 0.1
    assert "longest request: 262,144 tokens" in text


def test_what_does_not_fit_says_so():
    with pytest.raises(ConfigError, match=r"the weights do not fit: they take 74\.23 GiB"):
        memory_table.table(FLINT, "bf16", 80)
    with pytest.raises(ConfigError, match=r"no room for the KV cache.*Lower --max-num-seqs"):
        memory_table.table(FLINT, "nvfp4", 48, max_num_seqs=600)
    with pytest.raises(ConfigError, match="--device-gib -1"):
        memory_table.table(FLINT, "nvfp4", -1)


def test_the_command_needs_no_device(capsys):
    assert main(["info", "--memory", "--device-gib", "16"]) == 0
    assert "free before the cache" in capsys.readouterr().out
    assert main(["info", "--memory", "--device-gib", "nan"]) == 2
    assert "--device-gib nan" in capsys.readouterr().err
