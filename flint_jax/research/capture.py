"""Run the model, bring back what the patterns name, with patches on the way."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from flint_jax.config import FlintConfig
from flint_jax.errors import RequestError
from flint_jax.research.names import match, site_axes
from flint_jax.research.patches import Patch, check_fit
from flint_jax.research.tracing import as_model, as_rows, forward
from flint_jax.sites import recording

Patches = Mapping[str, Patch | Sequence[Patch]]


class Capture(Mapping[str, Array]):
    """Site name -> array, in forward order; ``logits`` [B,T,V] float32 (None if they were not wanted)."""

    def __init__(self, config: FlintConfig, found: dict[str, Array], logits: Float[Array, "B T V"] | None):
        self.config, self.logits = config, logits
        self._found = {name: found[name] for name in match(config, found)}

    def __getitem__(self, name: str) -> Array:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def stack(self, pattern: str) -> Array:
        """The captured sites that a pattern names, stacked along a new first axis in forward order."""
        names = [name for name in match(self.config, [pattern]) if name in self._found]
        if not names:
            raise RequestError(f"nothing that {pattern!r} names was captured; captured: {', '.join(self) or 'nothing'}")
        shapes = {self._found[name].shape: name for name in reversed(names)}
        if len(shapes) > 1:
            some = ", ".join(f"{name} {list(shape)}" for shape, name in reversed(shapes.items()))
            raise RequestError(
                f"{pattern!r} names sites of different shapes, which cannot be stacked: {some}. Name fewer sites",
                param="pattern",
            )
        return jnp.stack([self._found[name] for name in names])


def capture(
    lm,
    tokens: Int[Array, "B T"] | Sequence[int],
    patterns: Sequence[str] | str = (),
    *,
    lengths: Int[Array, " B"] | None = None,
    patch: Patches | None = None,
    logits: bool = True,
) -> Capture:
    """Forward pass over whole rows; what the patterns name comes back.

    lm: LanguageModel or Flint. tokens: int [T] or right-padded [B,T]; lengths: [B]. patterns: names of
    ``site_names``, with ``*`` for one part (``blocks.*.post``). patch: pattern -> Patch or several; a captured site is
    shown after its patches. logits: whether to compute them (without, blocks that nothing needs are not run).

    Compiled once per shape, set of sites and kind of patches; what is not asked for is not in the program. Attention
    probabilities cost T x T numbers a head. Raises RequestError for unknown names and for patches that a site does not
    take.
    """
    model = as_model(lm)
    tokens, lengths = as_rows(model, tokens, lengths)
    if not isinstance(patterns, Iterable):
        raise RequestError(f"patterns = {patterns!r:.60}: need a name or several", param="patterns")
    wanted = match(model.config, [patterns] if isinstance(patterns, str) else patterns)
    unseen = [name for name in wanted if name.endswith(".window")]
    if unseen:
        raise RequestError(f"{unseen[0]} can be patched, not captured", param="patterns")
    graph, state = nnx.split(model)
    found, out = _run(graph, state, tokens, lengths, _resolve(model.config, patch, tokens.shape), tuple(wanted), logits)
    return Capture(model.config, found, out)


def _resolve(config: FlintConfig, patch: Patches | None, shape: tuple[int, int]) -> dict[str, tuple[Patch, ...]]:
    """Patterns -> names; refuses what cannot work on tokens of this shape."""
    if not isinstance(patch or {}, Mapping):
        raise RequestError(f"patch = {patch!r:.60}: need a dict of site names and patches", param="patch")
    out: dict[str, tuple[Patch, ...]] = {}
    for pattern, given in (patch or {}).items():
        patches = tuple(given) if isinstance(given, Sequence) else (given,)
        for name in match(config, [pattern]):
            _check(config, name, patches, shape)
            out[name] = (*out.get(name, ()), *patches)
    for name, patches in out.items():
        if name.endswith(".router.choice"):
            _check_experts(config, name, patches)
    return out


def _check(config: FlintConfig, name: str, patches: tuple[Patch, ...], shape: tuple[int, int]) -> None:
    for patch in patches:
        if not isinstance(patch, Patch):
            raise RequestError(f"{name}: need research.replace, add and the like, got {patch!r:.60}", param="patch")
        if patch.expert_kind is not None and not name.endswith(".router.choice"):
            raise RequestError(f"{name}: research.{patch.expert_kind} is for ...mlp.router.choice", param="patch")
        if (patch.kind == "window") != name.endswith(".attn.window"):
            kind = "only research.window" if name.endswith(".attn.window") else "research.replace, add and the like"
            raise RequestError(f"{name} takes {kind}, got {patch.kind}", param="patch")
        if name.endswith(".lens"):
            raise RequestError(f"{name} can be captured, not patched; patch {name[:-4]}post", param="patch")
        if name.endswith(".router.ids") and patch.kind != "apply":
            _check_ids(config, name, patch)
        if patch.expert_kind is None:
            check_fit(patch, name, site_axes(config, name, *shape))


def _check_ids(config: FlintConfig, name: str, patch: Patch) -> None:
    """An expert that is not there would be looked up all the same."""
    known = not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(patch.value))
    ids = np.asarray(patch.value) if known else np.zeros(0, np.int32)
    last = config.num_experts - 1
    if patch.kind != "replace" or (ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() > last)):
        raise RequestError(
            f"{name} are numbers of experts: replace them by whole numbers from 0 to {last}", param="patch"
        )


def _check_experts(config: FlintConfig, name: str, patches: tuple[Patch, ...]) -> None:
    forced: set[int] = set()
    banned: set[int] = set()
    for patch in patches:
        if patch.expert_kind is None:
            continue
        ids = {int(i) for i in patch.indices[0]}
        if max(ids) >= config.num_experts or min(ids) < 0:
            wrong = max(ids) if max(ids) >= config.num_experts else min(ids)
            raise RequestError(f"{name}: expert {wrong}; need 0 to {config.num_experts - 1}", param="patch")
        (forced if patch.expert_kind == "force" else banned).update(ids)
    active = config.num_experts_per_tok
    if len(forced) > active or config.num_experts - len(banned) < active or forced & banned:
        raise RequestError(
            f"{name}: {len(forced)} experts forced and {len(banned)} of {config.num_experts} banned; each token takes "
            f"{active}, and none can be both",
            param="patch",
        )


@functools.partial(jax.jit, static_argnames=("graph", "wanted", "logits"))
def _run(graph, state, tokens, lengths, patches, wanted, logits):
    model = nnx.merge(graph, state)
    hidden, tracer = forward(model, tokens, lengths, wanted, patches)
    needed = logits or "logits" in wanted
    if not needed:
        return tracer.found, None
    with recording(tracer):
        out = model.logits(hidden)
    return tracer.found, out if logits else None
