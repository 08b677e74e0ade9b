"""float32, numerics="transformers": every stored output of transformers within the goldens' own tolerances.

Limits are those of the goldens' README: logits max abs 2e-4 (transformers' own float32 noise is 1.5e-5 to 3.8e-5) and
rms 1e-4; hidden states, weights and log-probabilities 2e-4 of the largest value; router sets equal where the margin
exceeds 1e-4.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flint_jax.model import WholeSequence, add_norm
from flint_jax.moe import Routing
from tests.model import golden

EVERY_PROMPT = [(m, p) for m in golden.MODELS for p in golden.prompts(m)]


def assert_logits(got, want, max_abs=2e-4, rms=1e-4):
    error = np.abs(np.asarray(got, np.float64) - want)
    assert np.isfinite(error).all()
    assert error.max() <= max_abs
    assert np.sqrt((error**2).mean()) <= rms


def assert_close(got, want):
    limit = 2e-4 * max(1.0, float(np.abs(want).max()))
    assert np.abs(np.asarray(got, np.float64) - want).max() <= limit


@functools.cache
def traced(name, numerics="transformers", dtype="float32"):
    """tokens [B,T], lengths, start -> logits, residual stream after every layer, normed, routings."""
    lm = golden.language_model(name, numerics, dtype)
    graph, state = nnx.split(lm.model)

    @jax.jit
    def run(state, tokens, lengths, start):
        model = nnx.merge(graph, state)
        kv = WholeSequence(model.config, model.numerics, tokens.shape, lengths, start)
        residual, branch = model.embed.matrix[tokens].astype(model.numerics.dtype), None
        stream, routings = [residual], []
        for block in model.blocks:
            if hasattr(block.mlp, "router"):
                inner = block.mlp.router

                def spy(x, inner=inner):
                    routings.append(inner(x))
                    return routings[-1]

                block.mlp.router = nnx.static(spy)
            residual, branch = block(residual, branch, kv)
            stream.append(residual + branch)
        normed = add_norm(residual, branch, model.norm)[1]
        return model.logits(normed), jnp.stack(stream), normed, routings

    def call(tokens, lengths=None, start=0):
        """One shape for every case (4 rows of 32 or 128), so one compilation a model; padding is cut off again."""
        tokens = np.asarray(tokens)
        rows, width = tokens.shape
        padded = np.zeros((4, 32 if name == "T1" else 128), np.int32)
        padded[:rows, :width] = tokens
        sizes = np.ones(4, np.int32)
        sizes[:rows] = width if lengths is None else lengths
        starts = np.full(4, start, np.int32)
        logits, stream, normed, routings = run(state, jnp.asarray(padded), jnp.asarray(sizes), jnp.asarray(starts))
        routings = [
            Routing(*(np.asarray(x).reshape(*padded.shape, -1)[:rows, :width] for x in routing)) for routing in routings
        ]
        logits, stream, normed = np.asarray(logits), np.asarray(stream), np.asarray(normed)
        return logits[:rows, :width], stream[:, :rows, :width], normed[:rows, :width], routings

    return call


@pytest.mark.parametrize(("name", "prompt"), EVERY_PROMPT)
def test_prompt(name, prompt):
    g = {k.split(".")[1]: v for k, v in golden.arrays(name).items() if k.startswith(prompt + ".")}
    logits, stream, normed, routings = traced(name)(g["input_ids"][None])
    logits, stream, normed = logits[0], stream[:, 0], normed[0]
    assert_logits(logits[g["pos"]], g["logits_f32"])
    clear = g["top1_gap"] > 1e-3
    assert (logits.argmax(-1) == g["argmax"])[clear].all()
    ids = g["input_ids"]
    if len(ids) > 1:
        scores = np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))[np.arange(len(ids) - 1), ids[1:]]
        assert_close(scores, g["logprob"])
    assert_close(stream[:, g["hidden_pos"]], g["hidden"])
    assert_close(normed[g["hidden_pos"]], g["normed"])
    for layer, routing in enumerate(routings):
        mine, theirs = routing.ids[0], g["topk_ids"][layer]
        same = (np.sort(mine, -1) == np.sort(theirs, -1)).all(-1)
        assert (same | (g["margin"][layer] < 1e-4)).all()
        assert_close(routing.weights[0][g["hidden_pos"]], g["topk_weights"][layer])


def test_debug_tensors_of_the_first_layers():
    """q/k norms, v, heads, branch outputs of T1, tensor by tensor."""
    lm = golden.language_model("T1")
    with np.load(golden.FOLDER / "T1.debug.npz") as file:
        debug = dict(file)
    ids = golden.arrays("T1")["len10.input_ids"]
    graph, state = nnx.split(lm.model)
    seen = jax.jit(lambda state: _debug_tensors(nnx.merge(graph, state), ids))(state)
    compared = 0
    for key, value in seen.items():
        if key in debug:
            assert_close(np.asarray(value).reshape(debug[key].shape), debug[key])
            compared += 1
    assert compared >= 6 * lm.config.num_hidden_layers


def _debug_tensors(model, ids):
    """What T1.debug.npz holds, under its keys."""
    seen = {}
    kv = WholeSequence(model.config, model.numerics, (1, len(ids)))
    attend = kv.attend

    def spy(layer, q, k, v, sinks):
        seen[f"{layer}.v"] = v
        if not model.config.rope_layers[layer]:  # stored before RoPE
            seen[f"{layer}.q_norm"], seen[f"{layer}.k_norm"] = q, k
        out = attend(layer, q, k, v, sinks)
        seen[f"{layer}.attn_heads"] = out.reshape(1, len(ids), -1)
        return out

    kv.attend = spy
    residual, branch = model.embed.matrix[jnp.asarray(ids)[None]], None
    for i, block in enumerate(model.blocks):
        residual, x = add_norm(residual, branch, block.attn_norm)
        seen[f"{i}.in_norm"] = x
        branch = block.attn(x, kv)
        seen[f"{i}.attn_out"] = branch
        residual, x = add_norm(residual, branch, block.mlp_norm)
        seen[f"{i}.post_norm"] = x
        branch = block.mlp(x)
        seen[f"{i}.mlp_out"] = branch
        if hasattr(block.mlp, "shared"):
            seen[f"{i}.shared_out"] = block.mlp.shared(x)
    return seen


@pytest.mark.parametrize("name", golden.MODELS)
def test_right_padded_batch(name):
    g = golden.arrays(name)
    ids, mask = g["batch_right.input_ids"], g["batch_right.attention_mask"]
    lengths = mask.sum(-1)
    logits = traced(name)(ids, lengths)[0]
    assert_logits(logits[np.arange(len(ids)), lengths - 1], g["batch_right.last_logits_f32"])
    want = g["batch_right.argmax"]
    assert (logits.argmax(-1) == want)[want >= 0].all()


@pytest.mark.parametrize("name", golden.MODELS)
def test_left_padded_rows_are_the_rows_alone(name):
    g = golden.arrays(name)
    ids, mask = g["batch_left.input_ids"], g["batch_left.attention_mask"]
    lengths = mask.sum(-1)
    shifted = np.zeros_like(ids)
    for row, (source, n) in enumerate(zip(ids, lengths, strict=True)):
        shifted[row, :n] = source[len(source) - n :]
    logits = traced(name)(shifted, lengths)[0]
    assert_logits(logits[np.arange(len(ids)), lengths - 1], g["batch_left.last_logits_f32"])


@pytest.mark.parametrize("name", golden.MODELS)
def test_far_positions_use_float32_angles(name):
    g = golden.arrays(name)
    case = golden.cases(name)["cases"]["offset"]
    logits = traced(name)(g["offset.input_ids"][None], start=case["start"])[0]
    noise = case["f32_vs_exact"]  # float32 angles are coarse out there, for transformers too
    stored = g["offset.pos"]
    assert_logits(
        logits[0][stored], g["offset.logits_f32"], max(2e-4, 3 * noise["max_abs"]), max(1e-4, 3 * noise["rms"])
    )


@pytest.mark.parametrize("name", golden.MODELS)
def test_scores(name):
    g = golden.arrays(name)
    rows = [(ids[:n], n) for ids, n in zip(g["score.input_ids"], g["score.lengths"], strict=True)]
    scores = golden.language_model(name).score([((), ids) for ids, _ in rows])
    split = golden.language_model(name).score([(ids[: n // 2], ids[n // 2 :]) for ids, n in rows])
    for row, (_, n) in enumerate(rows):
        assert_close(scores[row], g["score.token_logprob"][row, :n])
        assert_close(split[row], g["score.token_logprob"][row, n // 2 : n])
        assert abs(float(scores[row].sum()) - g["score.sum_logprob"][row]) <= 2e-4 * max(
            1, abs(g["score.sum_logprob"][row])
        )


# -- bfloat16: sharp one layer at a time, coarse end to end ------------------------------------------------------------


@functools.cache
def blockwise(name, numerics):
    """Residual stream before every block [L,T,D] -> after it (float32), and expert ids, each block on its own."""
    lm = golden.language_model(name, numerics, "bfloat16")
    graph, state = nnx.split(lm.model)

    @jax.jit
    def run(state, before):
        model = nnx.merge(graph, state)
        kv = WholeSequence(model.config, model.numerics, (1, before.shape[1]))
        after, ids = [], []
        for i, block in enumerate(model.blocks):
            x = before[i][None].astype(jnp.bfloat16)
            residual, branch = block(x, None, kv)
            after.append(residual.astype(jnp.float32) + branch.astype(jnp.float32))
            if i in model.config.moe_layers:
                normed = add_norm(x, block.attn(block.attn_norm(x), kv), block.mlp_norm)[1]
                ids.append(block.mlp.router(normed[0]).ids)
        return jnp.concatenate(after), jnp.stack(ids)

    return functools.partial(run, state)


@pytest.mark.parametrize("numerics", ["transformers", "serving"])
@pytest.mark.parametrize(("name", "prompt"), [("T1", "len27"), ("T2", "len34"), ("T2-nvfp4", "len34")])
def test_one_bfloat16_layer_at_a_time(name, prompt, numerics):
    """rms error over the rms of the layer's change: 0.6 to 1.2 % for transformers' own runs; 2 % is asked."""
    config = golden.language_model(name).config
    g = {k.split(".")[1]: v for k, v in golden.arrays(name).items() if k.startswith(prompt + ".")}
    after, ids = (np.asarray(x) for x in blockwise(name, numerics)(jnp.asarray(g["hidden"][:-1])))
    for i in range(config.num_hidden_layers):
        same = np.ones(len(g["hidden_pos"]), bool)
        if i in config.moe_layers:
            layer = config.moe_layers.index(i)
            same = (np.sort(ids[layer], -1) == np.sort(g["topk_ids"][layer], -1)).all(-1)
            assert (same | (g["margin"][layer] <= 0.1)).all()  # the largest margin that flipped was 0.037
        change = (g["hidden"][i + 1] - g["hidden"][i])[same]
        error = (after[i] - g["hidden"][i + 1])[same]
        assert np.sqrt((error**2).mean()) <= 0.02 * np.sqrt((change**2).mean()), f"layer {i}"


@pytest.mark.parametrize("numerics", ["transformers", "serving"])
@pytest.mark.parametrize("name", golden.MODELS)
def test_bfloat16_end_to_end(name, numerics):
    """Coarse by nature (one flipped expert moves a logit by whole units): pooled rms, and top-1 where it is clear."""
    lm = golden.language_model(name, numerics, "bfloat16")
    squares, rows, agree, clear = 0.0, 0, 0, 0
    for prompt in golden.prompts(name):
        g = {k.split(".")[1]: v for k, v in golden.arrays(name).items() if k.startswith(prompt + ".")}
        logits = np.asarray(lm.logits(g["input_ids"][None]))[0]
        error = logits[g["pos"]] - g["logits_f32"]
        squares, rows = squares + float((error**2).mean(-1).sum()), rows + len(error)
        sure = g["top1_gap"] > 1
        agree, clear = agree + int((logits.argmax(-1) == g["argmax"])[sure].sum()), clear + int(sure.sum())
    assert (squares / rows) ** 0.5 <= golden.cases(name)["totals"]["bf16_pooled_rms_limit"]
    assert agree >= 0.9 * clear
