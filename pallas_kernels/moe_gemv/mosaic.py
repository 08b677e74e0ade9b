"""The mixture of experts on NVIDIA GPUs: which kernels run, and what they can take."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels import device, emit
from pallas_kernels.dispatch import KernelUnsupported
from pallas_kernels.layout import BLOCK, ROWS, Tiles
from pallas_kernels.moe_gemv import mosaic_block, mosaic_down, mosaic_gate_up, mosaic_router

MAX_TOKENS = 16


def router(x, weight, layer, norm):
    """See ``api.router``. One kernel."""
    from pallas_kernels.moe_gemv.api import RouterResult

    tokens, columns = x.shape
    _check_tokens(x)
    if weight.dtype != jnp.bfloat16 or weight.ndim != 3:
        raise KernelUnsupported(f"a router of {weight.dtype}, rank {weight.ndim}")
    add = norm.residual is not None
    (one_weight,), weight_sliced = emit.slice_layer(layer, weight)
    (one_norm,), norm_sliced = emit.slice_layer(norm.layer, norm.weight)
    sliced = weight_sliced and norm_sliced
    spec = mosaic_router.Spec(tokens, columns, weight.shape[1], add, norm.eps, sliced)
    operands = [x, one_norm, one_weight] if sliced else [emit.index_operand(layer, norm.layer), x, norm.weight, weight]
    operands += [norm.residual] if add else []
    logits, normed, *residual = mosaic_router.build(spec)(*operands)
    return RouterResult(logits, normed, residual[0] if add else None)


def experts(x, logits, weights, layer, *, active):
    """See ``api.experts``. Two kernels: gate and up, then down."""
    from pallas_kernels.moe_gemv.api import ExpertsResult

    tokens, columns = x.shape
    _check_tokens(x)
    stacks, nvfp4 = _check_experts(weights)
    _, count, rows, width = weights.gate_up.shape
    shared_rows = weights.shared_gate_up.shape[-2]
    if width != columns or logits.shape != (tokens, count):
        raise ValueError(f"activations {x.shape}, logits {logits.shape}, expert weights {weights.gate_up.shape}")
    arrays = [array for stack in stacks for array in (stack.words, stack.global_scale)]
    arrays, sliced = emit.slice_layer(layer, *arrays)
    index = [] if sliced else [emit.index_operand(layer)]
    gate_up, down_stack, shared_gate_up, shared_down = (arrays[i : i + 2] for i in range(0, 8, 2))
    layout = mosaic_gate_up.Spec(
        tokens=tokens,
        active=active,
        experts=count,
        tiles=rows // ROWS,
        blocks=columns // 128,
        shared_tiles=shared_rows // ROWS,
        nvfp4=nvfp4,
        cores=device.current().cores,
        sliced=sliced,
        scales=gate_up[1].shape[-1],
        shared_scales=shared_gate_up[1].shape[-1],
    )
    act, ids, mix = mosaic_gate_up.build(layout)(*index, logits, x, *gate_up, *shared_gate_up)
    down = mosaic_down.Spec(
        tokens=tokens,
        active=active,
        experts=count,
        tiles=columns // ROWS,
        blocks=rows // 2 // 128,
        shared_blocks=shared_rows // 2 // 128,
        nvfp4=nvfp4,
        sliced=sliced,
        scales=down_stack[1].shape[-1],
        shared_scales=shared_down[1].shape[-1],
    )
    (out,) = mosaic_down.build(down)(*index, ids, mix, act, *down_stack, *shared_down)
    return ExpertsResult(out, ids, mix)


def block(x, router_weight, norm, weights, layer, exchange, *, active):
    """See ``api.block``. One kernel, for one token."""
    from pallas_kernels.moe_gemv.api import BlockResult

    tokens, columns = x.shape
    _check_tokens(x)
    stacks, nvfp4 = _check_experts(weights)
    _, count, rows, width = weights.gate_up.shape
    shared_rows = weights.shared_gate_up.shape[-2]
    if width != columns or router_weight.shape[1:] != (count, columns):
        raise ValueError(f"activations {x.shape}, router {router_weight.shape}, expert weights {weights.gate_up.shape}")
    if tokens != 1 or not nvfp4 or norm.residual is None or router_weight.dtype != jnp.bfloat16:
        raise KernelUnsupported(f"{tokens} tokens, NVFP4 {nvfp4}, router {router_weight.dtype}; or no residual")
    wanted = mosaic_block.exchange_words(columns, count, active, rows // 2, shared_rows // 2)
    if exchange.shape != (wanted,) or exchange.dtype != jnp.int32:
        raise ValueError(f"exchange buffer {exchange.dtype}{exchange.shape}: expected int32[{wanted}] (new_exchange)")
    spec = mosaic_block.Spec(
        active=active,
        experts=count,
        tiles=rows // ROWS,
        blocks=columns // BLOCK,
        shared_tiles=shared_rows // ROWS,
        eps=norm.eps,
        scales=tuple(stack.global_scale.shape[-1] for stack in stacks),
    )
    spec.check(device.current().cores)
    arrays = [array for stack in stacks for array in (stack.words, stack.global_scale)]
    operands = [emit.index_operand(layer, norm.layer), x, norm.residual, norm.weight, router_weight, *arrays, exchange]
    return BlockResult(*mosaic_block.build(spec)(*operands))


def block_apart(x, router_weight, norm, weights, layer, exchange, *, active):
    """See ``api.block``. Three kernels, which do not need the exchange buffer."""
    from pallas_kernels.moe_gemv.api import BlockResult

    routed = router(x, router_weight, layer, norm)
    result = experts(routed.normed, routed.logits, weights, layer, active=active)
    return BlockResult(result.out, routed.residual, routed.logits, result.ids, result.weights, exchange)


def _check_experts(weights) -> tuple[tuple[Tiles, ...], bool]:
    """(gate and up, down, the same of the shared expert; whether they are NVFP4), or KernelUnsupported."""
    stacks = (weights.gate_up, weights.down, weights.shared_gate_up, weights.shared_down)
    for stack in stacks:
        if not isinstance(stack, Tiles):
            raise KernelUnsupported(f"weights stored as {type(stack).__name__}")
    kinds = {stack.nvfp4 for stack in stacks}
    if len(kinds) != 1:
        raise KernelUnsupported("routed and shared experts in different formats")
    if [stack.paired for stack in stacks] != [True, False, True, False]:
        raise KernelUnsupported("gate and up must share tiles, down must not")
    if len(weights.down.segments) != 1 or len(weights.shared_down.segments) != 1:
        raise KernelUnsupported("several global scales in one down matrix")
    return stacks, kinds.pop()


def _check_tokens(x) -> None:
    if x.shape[0] > MAX_TOKENS:
        raise KernelUnsupported(f"{x.shape[0]} tokens; the kernel takes up to {MAX_TOKENS}")
    if x.dtype != jnp.bfloat16:
        raise KernelUnsupported(f"activations of {x.dtype}")
