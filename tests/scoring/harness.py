"""As much of lm-evaluation-harness as a model class sees, for where it is not installed.

A request has ``args``; ``loglikelihood`` gets (context, continuation), ``generate_until`` (context, fields).
"""

import sys
import types
from typing import NamedTuple


class Instance(NamedTuple):
    """A request."""

    args: tuple


class CacheHook:
    """Remembers what the model reported."""

    def __init__(self):
        self.seen = []

    def add_partial(self, kind, request, answer):
        self.seen.append((kind, request, answer))


class TemplateLM:
    """Encodes pairs, asks ``_loglikelihood_tokens``."""

    def __init__(self):
        self.cache_hook = CacheHook()

    def loglikelihood(self, requests, disable_tqdm=False):
        made = []
        for context, continuation in (r.args for r in requests):
            if context:
                bare = context.rstrip()
                rest = context[len(bare) :] + continuation
                head = self.tok_encode(bare)
                made.append(((context, continuation), head, self.tok_encode(bare + rest)[len(head) :]))
            else:
                ids = self.tok_encode(continuation, add_special_tokens=False)
                made.append(((context, continuation), [self.prefix_token_id], ids))
        return self._loglikelihood_tokens(made, disable_tqdm=disable_tqdm)


def install(monkeypatch) -> dict:
    """Put the stand-in where imports find it; returns the registry of models."""
    registry = {}

    def register_model(name):
        def register(cls):
            registry[name] = cls
            return cls

        return register

    parts = {
        "lm_eval": {},
        "lm_eval.models": {},
        "lm_eval.api": {},
        "lm_eval.api.model": {"TemplateLM": TemplateLM},
        "lm_eval.api.registry": {"register_model": register_model},
    }
    for name, contents in parts.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "flint_jax.integrations.lm_eval", raising=False)
    return registry
