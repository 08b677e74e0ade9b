"""What can be done to a site: replace, add, scale, ablate, any function; force or ban experts; another window.

A patch is a pytree. Its numbers are traced, so new values compile nothing and can be differentiated; which sites are
patched, how, and at which slices is static.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from flint_jax.errors import RequestError


class Mask(NamedTuple):
    """Stands in the form of an index for a mask: as many arrays of numbers as it has axes follow."""

    shape: tuple[int, ...]


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
            shape = getattr(out, "shape", type(out).__name__)
            if shape != x.shape:
                raise RequestError(f"the patch function turned {x.shape} into {shape}; need the same shape")
            return out.astype(x.dtype)
        where = x.at[_rebuild(self.form, self.indices)]
        value = jnp.asarray(self.value)
        if self.kind == "scale":
            return where.set((where.get().astype(jnp.float32) * value.astype(jnp.float32)).astype(x.dtype))
        value = value.astype(x.dtype)
        return where.set(value) if self.kind == "replace" else where.add(value)


def replace(value: Any, at: Any = ...) -> Patch:
    """Put ``value`` in place of the site (or of ``site[at]``; ``np.s_[:, 5]`` is position 5). Broadcasts.

    at: whole numbers, slices, ..., None and masks. ``capture`` raises RequestError for what is beyond the site.
    """
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
    if not callable(function):
        raise RequestError(f"apply({function!r:.60}): need a function of the site's array")
    return Patch("apply", function=function)


def force(experts: Sequence[int]) -> Patch:
    """For ``...router.choice``: these experts are always among the chosen; their weights follow their own scores."""
    return _experts("force", experts, np.inf)


def ban(experts: Sequence[int]) -> Patch:
    """For ``...router.choice``: these experts are never chosen."""
    return _experts("ban", experts, -np.inf)


def window(keys: int | None) -> Patch:
    """For ``...attn.window``: a query sees this many keys, its own included; None: all before it. Static."""
    if keys is not None and (isinstance(keys, bool) or not isinstance(keys, int | np.integer) or keys < 1):
        raise RequestError(f"window = {keys!r:.60}: need at least 1 key (the query's own), or None for no window")
    return Patch("window", function=keys if keys is None else int(keys))


def _experts(kind: str, experts: Sequence[int], value: float) -> Patch:
    try:
        given = np.asarray(list(experts))
    except (TypeError, ValueError):
        given = np.zeros(1, object)
    if not given.size:
        raise RequestError(f"{kind}: name at least one expert")
    if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer) or not _fits_int32(given):
        raise RequestError(f"{kind}({experts!r:.60}): need a list of whole numbers, e.g. {kind}([0, 5])")
    return Patch(
        "replace", np.float32(value), (np.unique(given).astype(np.int32),), (Ellipsis, _NUMBER), expert_kind=kind
    )


_NUMBER = "number"  # stands in the form of an index where a traced number goes


def _indexed(kind: str, value: Any, at: Any) -> Patch:
    _check_value(kind, value)
    form, indices = [], []
    for part in at if isinstance(at, tuple) else (at,):
        if part is None or part is Ellipsis:
            form.append(part)
        elif isinstance(part, slice):
            form.append(_slice(part, at))
        else:
            array = _numbers(part, at)
            if array.dtype != bool:
                form.append(_NUMBER)
                indices.append(array)
                continue
            if isinstance(array, jax.core.Tracer):
                raise RequestError(
                    "a mask in at must be known outside jit; apply(lambda x: jnp.where(...)) takes others"
                )
            form.append(Mask(array.shape))
            indices += [axis.astype(np.int32) for axis in np.nonzero(np.asarray(array))]
    if sum(part is Ellipsis for part in form) > 1:
        raise RequestError(f"at = {at!r:.80}: only one ... is possible", param="at")
    return Patch(kind, value, tuple(indices), tuple(form))


def _check_value(kind: str, value: Any) -> None:
    leaves = [leaf if isinstance(leaf, jax.Array) else np.asarray(leaf) for leaf in jax.tree.leaves(value)]
    if not leaves or any(leaf.dtype.kind not in "fiubV" for leaf in leaves):  # V: bfloat16 and float8
        raise RequestError(f"{kind}({value!r:.60}): need real numbers", param="value")


def _slice(part: slice, at: Any) -> tuple[Any, ...]:
    numbers = (part.start, part.stop, part.step)
    if any(not (n is None or isinstance(n, int | np.integer)) for n in numbers) or part.step == 0:
        raise RequestError(f"at = {at!r:.80}: need whole numbers in slices, and a step that is not 0", param="at")
    return tuple(n if n is None else int(n) for n in numbers)


def _numbers(part: Any, at: Any) -> np.ndarray | jax.Array:
    """int32 numbers or a mask of an index."""
    try:
        array = part if isinstance(part, jax.Array) else np.asarray(part)
    except ValueError:
        array = np.zeros(1, object)
    if array.dtype == bool and array.ndim:
        return array
    whole = np.issubdtype(array.dtype, np.integer) or not array.size
    if not whole or not (isinstance(array, jax.core.Tracer) or _fits_int32(np.asarray(array))):
        raise RequestError(f"at = {at!r:.80}: need whole numbers, slices or masks, as in x[at]", param="at")
    return array.astype(np.int32)


def _fits_int32(array: np.ndarray) -> bool:
    """Without this 2**32 would be position 0."""
    return not array.size or -(1 << 31) <= int(array.min()) <= int(array.max()) < 1 << 31


def _rebuild(form: tuple[Any, ...], indices: tuple[Any, ...]) -> tuple[Any, ...]:
    numbers = iter(indices)
    out = []
    for part in form:
        if isinstance(part, Mask):
            out += [next(numbers) for _ in part.shape]
        else:
            out.append(next(numbers) if isinstance(part, str) else slice(*part) if isinstance(part, tuple) else part)
    return tuple(out)


# -- does it fit a site? -----------------------------------------------------------------------------------------------


def check_fit(patch: Patch, name: str, axes: Mapping[str, int]) -> None:
    """Raise RequestError when a patch reaches beyond a site, or its value does not fit there.

    axes: letter -> size, in order. Positions that are traced are not known and pass (JAX leaves out what is beyond).
    """
    if patch.form is None:
        return
    shape = tuple(axes.values())
    site = f"{name} is [{', '.join(f'{axis}={size}' for axis, size in axes.items())}]"
    takes = sum(len(p.shape) if isinstance(p, Mask) else p is not None and p is not Ellipsis for p in patch.form)
    if takes > len(shape):
        raise RequestError(f"{site}; at names {takes} axes, need at most {len(shape)}", param="at")
    numbers, at = iter(patch.indices), 0
    for part in patch.form:
        if part is Ellipsis:
            at += len(shape) - takes
        elif isinstance(part, Mask):
            mine = shape[at : at + len(part.shape)]
            if part.shape != mine:
                raise RequestError(f"{site}; a mask at axis {at} is {list(part.shape)}, need {list(mine)}", param="at")
            at += len(part.shape)
            for _ in part.shape:
                next(numbers)
        elif part is not None:
            _check_axis(part if isinstance(part, tuple) else next(numbers), f"{site}; axis {at}", shape[at])
            at += 1
    try:
        jax.eval_shape(patch, jax.ShapeDtypeStruct(shape, jnp.float32))
    except (TypeError, ValueError, IndexError) as error:
        raise RequestError(f"{site}; the value or at does not fit: {error!s:.200}", param="value") from None


def _check_axis(part: Any, where: str, size: int) -> None:
    if isinstance(part, tuple):
        if not len(range(*slice(*part).indices(size))):
            text = ":".join("" if n is None else str(n) for n in part[: 2 if part[2] is None else 3])
            raise RequestError(f"{where} has {size} entries, and at = {text} selects none of them", param="at")
    elif not isinstance(part, jax.core.Tracer):
        beyond = np.asarray(part)
        beyond = beyond[(beyond < -size) | (beyond >= size)]
        if beyond.size:
            raise RequestError(
                f"{where} has {size} entries, got {beyond[0]}; need 0 to {size - 1}, or -1 to -{size}",
                param="at",
            )
