"""The names of everything that can be captured or patched, in the order of the forward pass."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable

from flint_jax.config import FlintConfig
from flint_jax.errors import RequestError

_ATTENTION = {
    "input": "[B,T,D] normed stream",
    "q": "[B,T,N,H] after norm and RoPE",
    "k": "[B,T,K,H] after norm and RoPE",
    "v": "[B,T,K,H]",
    "sinks": "[N] sink logits, float32",
    "window": "patch only: keys that a query sees, its own included",
    "probs.{head}": "[B,T,T+1] float32; the last column is the sink's share",
    "heads": "[B,T,N,H] attention output before the o projection",
    "out": "[B,T,D]",
}
_DENSE = {"input": "[B,T,D] normed stream", "act": "[B,T,F] silu(gate) * up", "out": "[B,T,D]"}
_MOE = {
    "input": "[B,T,D] normed stream",
    "router.logits": "[B,T,E] float32",
    "router.choice": "[B,T,E] what the best A are taken from: logits, or their sigmoid (numerics transformers)",
    "router.ids": "[B,T,A] int32, best first",
    "router.weights": "[B,T,A] float32",
    "experts": "[B,T,A,D] output of each chosen expert, before its weight",
    "routed": "[B,T,D] weighted sum of the experts",
    "shared.input": "[B,T,D] the same as input",
    "shared.act": "[B,T,F]",
    "shared.out": "[B,T,D] shared expert",
    "out": "[B,T,D] routed + shared",
}


def site_names(config: FlintConfig) -> dict[str, str]:
    """Name -> shape and meaning of every site.

    Letters: B rows, T tokens, D model width, N query heads, K kv heads, H head width, F inner width, E experts, A
    active experts, V vocabulary. Dtype: the model's compute dtype unless said.
    """
    names = {"embed": "[B,T,D] embeddings"}
    for i in range(config.num_hidden_layers):
        block = f"blocks.{i}."
        names[block + "pre"] = "[B,T,D] residual stream before the block"
        for name, what in _ATTENTION.items():
            heads = range(config.num_attention_heads) if "{head}" in name else (0,)
            names |= {f"{block}attn.{name.format(head=n)}": what for n in heads}
        names[block + "mid"] = "[B,T,D] residual stream between attention and MLP"
        names |= {f"{block}mlp.{n}": w for n, w in (_DENSE if i in config.mlp_only_layers else _MOE).items()}
        names[block + "post"] = "[B,T,D] residual stream after the block"
        names[block + "lens"] = "[B,T,V] float32; capture only: final norm and head applied to post (logit lens)"
    names["norm"] = "[B,T,D] final normed stream, the head's input"
    names["logits"] = "[B,T,V] float32"
    return names


def site_axes(config: FlintConfig, name: str, rows: int, tokens: int) -> dict[str, int]:
    """Axis -> size of a site for B = ``rows`` and T = ``tokens``, by the letters of ``site_names``; {} of a window."""
    what = site_names(config)[name]
    if not what.startswith("["):
        return {}
    shared = ".shared." in name
    sizes = {
        "B": rows,
        "T": tokens,
        "T+1": tokens + 1,
        "D": config.hidden_size,
        "N": config.num_attention_heads,
        "K": config.num_key_value_heads,
        "H": config.head_dim,
        "F": config.shared_expert_intermediate_size if shared else config.intermediate_size,
        "E": config.num_experts,
        "A": config.num_experts_per_tok,
        "V": config.vocab_size,
    }
    return {axis: sizes[axis] for axis in what[1 : what.index("]")].split(",")}


def match(config: FlintConfig, patterns: Iterable[str]) -> list[str]:
    """The sites that some patterns name, in forward order. ``*`` stands for one part between dots, ``**`` for several.

    Raises RequestError for a pattern that names nothing, with the nearest names.
    """
    names = site_names(config)
    chosen: set[str] = set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise RequestError(f"{pattern!r:.60} is no name of a site; need strings such as 'blocks.*.post'")
        found = {name for name in names if _fits(name.split("."), pattern.split("."))}
        if not found:
            near = difflib.get_close_matches(pattern, names, 3, 0.3)
            raise RequestError(
                f"no site is called {pattern!r}; near it: {', '.join(near) or 'nothing'} "
                "(flint_jax.research.site_names lists all; * stands for one part between dots)",
                param="patterns",
            )
        chosen |= found
    return [name for name in names if name in chosen]


def _fits(parts: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_fits(parts[n:], pattern[1:]) for n in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])
