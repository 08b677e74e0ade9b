"""Research on the live model: look inside, change what is there, measure routers, compare, train.

Everything takes a ``LanguageModel`` or its ``Flint`` module, with packed or plain weights, and runs under ``jax.jit``.
See docs/research.md.
"""

from flint_jax.research.capture import Capture, capture
from flint_jax.research.divergence import LayerKL, layer_kl, with_numerics
from flint_jax.research.names import site_names
from flint_jax.research.patches import Patch, ablate, add, apply, ban, force, replace, scale, window
from flint_jax.research.routers import RouterStatistics, router_statistics

__all__ = [
    "Capture",
    "LayerKL",
    "Patch",
    "RouterStatistics",
    "ablate",
    "add",
    "apply",
    "ban",
    "capture",
    "force",
    "layer_kl",
    "replace",
    "router_statistics",
    "scale",
    "site_names",
    "window",
    "with_numerics",
]
