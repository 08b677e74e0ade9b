"""The engine over packed prefill steps: several prompts in one program, each as it would be alone."""

import pytest

from flint_jax import tiles
from flint_jax.engine import Engine
from flint_jax.model import Flint
from flint_jax.sampling_params import SamplingParams
from flint_jax.step import Sizes, Steps
from tests.model.test_decode_kernels import CONFIG, NUMERICS, weights
from tests.model.test_packed import prompt


def finished(engine, prompts):
    """Tokens and prompt log-probabilities of each."""
    events = [[] for _ in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    for sink, ids in zip(events, prompts, strict=True):
        engine.submit(ids, params, on_event=sink.append, prompt_logprobs=0)
    while engine.step():
        pass
    tokens = [[t for e in sink for t in e.token_ids] for sink in events]
    scores = [next(e.prompt_logprobs for e in sink if e.prompt_logprobs) for sink in events]
    return tokens, [[s.logprob for s in each[1:]] for each in scores]


@pytest.mark.slow
def test_prompts_together_are_as_each_alone():
    model = Flint(CONFIG, tiles.tile_weights(dict(weights("nvfp4"))), NUMERICS)
    steps = Steps(model, Sizes(4, 48, 700, (1, 4), (64, 256), rows_per_prefill=3))
    assert steps.packed
    engine = Engine(steps)
    prompts = [prompt(seed, length) for seed, length in ((1, 70), (2, 50), (3, 300), (4, 5))]
    together = finished(engine, prompts)
    alone = [finished(engine, [each]) for each in prompts]
    assert together[0] == [tokens for (tokens,), _ in alone]
    assert all(len(tokens) == 3 for tokens in together[0])
    # The head runs over other rows of a step, so a sum may end in another bit.
    for scores, (_, (expected,)) in zip(together[1], alone, strict=True):
        assert scores == pytest.approx(expected, abs=2e-2)
