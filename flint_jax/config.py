"""FlintConfig: the architecture of one checkpoint, frozen and validated.

Parsing config.json and GGUF metadata lives in ``loaders/config.py``; this module only knows what a valid Flint is.
"""

from __future__ import annotations

import dataclasses

from flint_jax.errors import ConfigError

FULL = "full_attention"
SLIDING = "sliding_attention"


@dataclasses.dataclass(frozen=True)
class FlintConfig:
    """Architecture of a Flint model. Names are those of the published config.json.

    ``layer_types`` and ``rope_layers`` have one entry per layer. ``sliding_window`` counts the current token:
    query i sees keys j with ``0 <= i - j < sliding_window``.

    Raises ConfigError when a field is out of range or two fields contradict each other.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    layer_types: tuple[str, ...]
    rope_layers: tuple[bool, ...]
    mlp_only_layers: tuple[int, ...]
    sliding_window: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 262144
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self):
        self._check()

    # -- derived -------------------------------------------------------------------------------------------------

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of the layers that attend to everything before them."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)

    @property
    def sliding_layers(self) -> tuple[int, ...]:
        """Indices of the layers that attend to the last ``sliding_window`` tokens."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == SLIDING)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts."""
        return tuple(i for i in range(self.num_hidden_layers) if i not in self.mlp_only_layers)

    @property
    def q_size(self) -> int:
        """Rows of the query projection: heads x head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key (or value) projection: kv heads x head_dim."""
        return self.num_key_value_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Number of weights, embedding and head included."""
        d, h, layers = self.hidden_size, self.head_dim, self.num_hidden_layers
        attention = d * (2 * self.q_size + 2 * self.kv_size) + 2 * h + self.num_attention_heads
        dense = 3 * d * self.intermediate_size
        expert = 3 * d * self.moe_intermediate_size
        moe = self.num_experts * (expert + d) + 3 * d * self.shared_expert_intermediate_size
        return (
            2 * self.vocab_size * d
            + d
            + layers * (attention + 2 * d)
            + len(self.mlp_only_layers) * dense
            + len(self.moe_layers) * moe
        )

    # -- validation ----------------------------------------------------------------------------------------------

    def _check(self):
        problems = []

        def need(ok: bool, message: str):
            if not ok:
                problems.append(message)

        for name in _POSITIVE_INTS:
            value = getattr(self, name)
            need(
                isinstance(value, int) and not isinstance(value, bool) and value > 0,
                f"{name} = {value!r}: need a positive integer",
            )
        if problems:
            raise ConfigError("invalid Flint config: " + "; ".join(problems))
        n = self.num_hidden_layers
        need(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"num_attention_heads = {self.num_attention_heads} is not a multiple of "
            f"num_key_value_heads = {self.num_key_value_heads}",
        )
        need(self.head_dim % 2 == 0, f"head_dim = {self.head_dim}: RoPE needs an even width")
        need(
            self.num_experts_per_tok <= self.num_experts,
            f"num_experts_per_tok = {self.num_experts_per_tok} exceeds num_experts = {self.num_experts}",
        )
        need(len(self.layer_types) == n, f"layer_types has {len(self.layer_types)} entries, num_hidden_layers is {n}")
        need(len(self.rope_layers) == n, f"rope_layers has {len(self.rope_layers)} entries, num_hidden_layers is {n}")
        unknown = sorted({str(t) for t in self.layer_types} - {FULL, SLIDING})
        need(not unknown, f"layer_types has unknown kinds {unknown}; known: {FULL}, {SLIDING}")
        need(
            all(isinstance(i, int) and 0 <= i < n for i in self.mlp_only_layers)
            and len(set(self.mlp_only_layers)) == len(self.mlp_only_layers),
            f"mlp_only_layers = {self.mlp_only_layers}: need distinct layer indices below {n}",
        )
        need(self.rope_theta > 0, f"rope_theta = {self.rope_theta}: need a positive number")
        need(0 < self.rms_norm_eps < 1, f"rms_norm_eps = {self.rms_norm_eps}: need a number between 0 and 1")
        need(self.routed_scaling_factor > 0, f"routed_scaling_factor = {self.routed_scaling_factor}: need > 0")
        for name in ("bos_token_id", "pad_token_id"):
            value = getattr(self, name)
            need(value is None or 0 <= value < self.vocab_size, f"{name} = {value} is outside the vocabulary")
        need(
            all(0 <= i < self.vocab_size for i in self.eos_token_ids),
            f"eos_token_ids = {self.eos_token_ids}: outside the vocabulary of {self.vocab_size}",
        )
        if problems:
            raise ConfigError("invalid Flint config: " + "; ".join(problems))


_POSITIVE_INTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "sliding_window",
    "max_position_embeddings",
)
