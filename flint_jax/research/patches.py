"""What can be done to a site: replace, add, scale, ablate, any function; force or ban experts; another window.

A patch is a pytree. Its numbers are traced, so new values compile nothing and can be differentiated; which sites are
patched, how, and at which slices is static.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from flint_jax.errors import RequestError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Patch:
    """One change of one site; made by the functions below. Several patches of a site are applied in order."""

    kind: str = dataclasses.field(metadata={"static": True})
    value: Any = None
    indices: tuple[Any, ...] = ()  # the numbers of an index expression
    form: tuple[Any, ...] | None = dataclasses.field(default=None, metadata={"static": True})  # the rest of it
    function: Callable[[Array], Array] | int | None = dataclasses.field(default=None, metadata={"static": True})
    expert_kind: str | None = dataclasses.field(default=None, metadata={"static": True})  # "force" or "ban"

    def __call__(self, x: Array) -> Array:
        """The patched value; same shape and dtype."""
        if self.kind == "apply":
            out = self.function(x)
            if out.shape != x.shape:
                raise RequestError(f"the patch function turned {x.shape} into {out.shape}; need the same shape")
            return out.astype(x.dtype)
        where = x.at[_rebuild(self.form, self.indices)]
        value = jnp.asarray(self.value)
        if self.kind == "scale":
            return where.set((where.get().astype(jnp.float32) * value.astype(jnp.float32)).astype(x.dtype))
        value = value.astype(x.dtype)
        return where.set(value) if self.kind == "replace" else where.add(value)


def replace(value: Any, at: Any = ...) -> Patch:
    """Put ``value`` in place of the site (or of ``site[at]``; ``np.s_[:, 5]`` is position 5). Broadcasts."""
    return _indexed("replace", value, at)


def add(value: Any, at: Any = ...) -> Patch:
    """Add ``value`` to the site (or to ``site[at]``)."""
    return _indexed("add", value, at)


def scale(factor: Any, at: Any = ...) -> Patch:
    """Multiply the site (or ``site[at]``) by ``factor``."""
    return _indexed("scale", factor, at)


def ablate(at: Any = ...) -> Patch:
    """Zeros in place of the site (or of ``site[at]``). For the mean instead, ``replace`` by it."""
    return _indexed("replace", 0, at)


def apply(function: Callable[[Array], Array]) -> Patch:
    """Any traceable function of the site. Another function object compiles anew."""
    return Patch("apply", function=function)


def force(experts: Sequence[int]) -> Patch:
    """For ``...router.choice``: these experts are always among the chosen; their weights follow their own scores."""
    return _experts("force", experts, np.inf)


def ban(experts: Sequence[int]) -> Patch:
    """For ``...router.choice``: these experts are never chosen."""
    return _experts("ban", experts, -np.inf)


def window(keys: int | None) -> Patch:
    """For ``...attn.window``: a query sees this many keys, its own included; None: all before it. Static."""
    if keys is not None and keys < 1:
        raise RequestError(f"window = {keys}: need at least 1 key (the query's own), or None for no window")
    return Patch("window", function=keys)


def _experts(kind: str, experts: Sequence[int], value: float) -> Patch:
    ids = np.unique(np.asarray(list(experts), np.int32))
    if not ids.size:
        raise RequestError(f"{kind}: name at least one expert")
    return Patch("replace", np.float32(value), (ids,), (Ellipsis, _NUMBER), expert_kind=kind)


_NUMBER = "number"  # stands in the form of an index where a traced number goes


def _indexed(kind: str, value: Any, at: Any) -> Patch:
    form, indices = [], []
    for part in at if isinstance(at, tuple) else (at,):
        if part is None or part is Ellipsis or isinstance(part, slice):
            form.append((part.start, part.stop, part.step) if isinstance(part, slice) else part)
        else:
            form.append(_NUMBER)
            part = part if isinstance(part, jax.Array) else np.asarray(part)
            if not jnp.issubdtype(part.dtype, jnp.integer) and part.dtype != bool:
                raise RequestError(f"at = {at!r:.80}: need whole numbers, slices or masks, as in x[at]", param="at")
            indices.append(part if part.dtype == bool else part.astype(np.int32))
    return Patch(kind, value, tuple(indices), tuple(form))


def _rebuild(form: tuple[Any, ...], indices: tuple[Any, ...]) -> tuple[Any, ...]:
    numbers = iter(indices)
    return tuple(
        next(numbers) if isinstance(part, str) else slice(*part) if isinstance(part, tuple) else part for part in form
    )
