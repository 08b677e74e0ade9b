"""What a request may ask for: names, ranges, defaults, and errors that name the field."""

import math

import numpy as np
import pytest

from flint_jax.errors import ConfigError, RequestError
from flint_jax.sampling import MAX_STOP_IDS, slot_row
from flint_jax.sampling_params import SamplingParams, needs, resolve

ACCEPTED = {
    "temperature": [0, 0.0, 1e-6, 1e-5, 0.005, 1, 2.0, 3.0, 1e300, np.float32(0.5)],
    "top_k": [-1, 0, 1, 20, 10**12, np.int64(3)],
    "top_p": [0, 0.0, 1e-9, 0.5, 1, 1.0],
    "min_p": [0, 0.3, 1.0],
    "max_tokens": [1, 10**9],
    "min_tokens": [0, 7],
    "seed": [0, 2**63 - 1, -(2**63), 2**64 - 1],
    "logprobs": [0, 20],
    "presence_penalty": [-2, 0, 2.0],
    "frequency_penalty": [-2, 0, 2.0],
    "repetition_penalty": [0.5, 1, 1.5],
    "ignore_eos": [True, False],
    "n": [1, 128],
}
NOT_A_NUMBER = [True, False, "0.5", "1", [1], math.nan, math.inf, -math.inf]
REFUSED = {
    "temperature": [*NOT_A_NUMBER, -1, -1e-9],
    "top_k": [*NOT_A_NUMBER, -2, 1.5, 2.0],
    "top_p": [*NOT_A_NUMBER, -1, 3.0, 1.0001],
    "min_p": [*NOT_A_NUMBER, -0.1, 1.1],
    "max_tokens": [*NOT_A_NUMBER, 0, -1, 2.0],
    "min_tokens": [*NOT_A_NUMBER, -1],
    "seed": [*NOT_A_NUMBER, 2**64, -(2**63) - 1, 1.0],
    "logprobs": [*NOT_A_NUMBER, -1, 21],
    "presence_penalty": [*NOT_A_NUMBER, 2.1, -2.1],
    "frequency_penalty": [*NOT_A_NUMBER, 2.1, -2.1],
    "repetition_penalty": [*NOT_A_NUMBER, 0, -1, 1e9, 10**400],
    "ignore_eos": [0, 1, "true"],
    "n": [*NOT_A_NUMBER, 0, -1, 129],
    "stop": ["", ["a", ""], [1], 5, b"a", {"a": 1}],
    "stop_token_ids": ["12", 5, [-1], [True], [1.0], ["1"], [None], {1: 2}, list(range(MAX_STOP_IDS + 1))],
    "logit_bias": [[], "x", {"a": 1}, {-1: 1}, {1.5: 1}, {True: 1}, {None: 1}, {1: None}, {1: "2"}, {1: math.nan},
                   {1: 101}, {1: -math.inf}, {"-1": 1}, {"٣": 1}],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, vs in ACCEPTED.items() for v in vs])
def test_accepts_legal_edges(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, vs in REFUSED.items() for v in vs])
def test_refuses_by_name(name, value):
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(RequestError, match="min_tokens is 4") as caught:
        SamplingParams(max_tokens=3, min_tokens=4)
    assert caught.value.param == "min_tokens"


def test_null_means_the_default():
    names = [f for f in ACCEPTED if f not in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")]
    nulls = dict.fromkeys([*names, "stop", "stop_token_ids", "logit_bias"])
    assert SamplingParams(**nulls) == SamplingParams()


def test_values_are_normalised():
    params = SamplingParams(stop="a", stop_token_ids={3, 1}, logit_bias={"7": 1, 2: -3}, seed=-1, top_k=np.int64(3))
    assert params.stop == ("a",)
    assert sorted(params.stop_token_ids) == [1, 3]
    assert params.logit_bias == {7: 1.0, 2: -3.0}
    assert params.seed is None
    assert type(params.top_k) is int


def test_the_callers_dict_is_copied():
    bias = {1: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = math.nan
    assert params.logit_bias == {1: 1.0}


def test_replace_checks_again():
    assert SamplingParams().replace(top_k=3).top_k == 3
    with pytest.raises(RequestError):
        SamplingParams().replace(top_k=-7)


@pytest.mark.parametrize(("field", "value"), [("logit_bias", {10: 1.0}), ("stop_token_ids", [10])])
def test_ids_outside_the_vocabulary_are_refused(field, value):
    params = SamplingParams(**{field: value})
    params.check_vocabulary(11)
    with pytest.raises(RequestError, match=f"{field} names token 10") as caught:
        params.check_vocabulary(10)
    assert caught.value.param == field
    with pytest.raises(RequestError, match=field):
        slot_row(params, [0], 10, [], 0)


@pytest.mark.parametrize("prompt", [[10], [-1]])
def test_prompt_outside_the_vocabulary_is_refused(prompt):
    with pytest.raises(RequestError, match="outside the vocabulary"):
        slot_row(SamplingParams(), prompt, 10, [], 0)


def test_stop_set():
    params = SamplingParams(stop_token_ids=[5, 3, 5])
    assert params.stop_set([9, 3]) == (3, 5, 9)
    assert params.stop_set(params.stop_set([9, 3])) == (3, 5, 9)
    assert params.replace(ignore_eos=True).stop_set([9, 3]) == (3, 5)
    full = SamplingParams(stop_token_ids=range(MAX_STOP_IDS))
    assert len(full.stop_set([0])) == MAX_STOP_IDS
    with pytest.raises(RequestError, match=f"at most {MAX_STOP_IDS}") as caught:
        full.stop_set([99])
    assert caught.value.param == "stop_token_ids"


SILENT = SamplingParams(temperature=None, top_k=None, top_p=None, min_p=None, repetition_penalty=None)


def test_resolve_fills_only_what_is_silent():
    flint = resolve(SILENT, {})
    assert (flint.temperature, flint.top_p, flint.top_k) == (1.0, 0.95, 20)
    assert (flint.min_p, flint.repetition_penalty) == (0.0, 1.0)

    file = {"temperature": 0.7, "top_k": 40, "min_p": None, "repetition_penalty": 1.1, "eos_token_id": [1]}
    filled = resolve(SILENT, file)
    assert (filled.temperature, filled.top_p, filled.top_k) == (0.7, 0.95, 40)
    assert (filled.min_p, filled.repetition_penalty) == (0.0, 1.1)

    asked = resolve(SILENT.replace(temperature=1.0, top_k=-1, repetition_penalty=1.0), file)
    assert (asked.temperature, asked.top_k, asked.repetition_penalty) == (1.0, -1, 1.0)
    assert resolve(SamplingParams(temperature=0), file).temperature == 0


def test_resolve_reports_a_bad_generation_config():
    with pytest.raises(ConfigError, match=r"generation config.*top_p"):
        resolve(SILENT, {"top_p": 7})


def test_choices_are_reproducible_and_differ():
    params = SamplingParams(n=3, seed=5)
    assert params.choices() == params.choices()
    assert len({p.seed for p in params.choices()}) == 3
    assert all(p.n == 1 for p in params.choices())
    assert [p.seed for p in SamplingParams(n=2).choices()] == [None, None]
    last = SamplingParams(n=2, seed=2**64 - 1).choices()
    assert [p.seed for p in last] == [2**64 - 1, 0]
    assert SamplingParams(n=2, seed=-(2**63)).choices()[1].seed == 2**63 + 1


def test_needs_names_the_stages_in_use():
    off = {"adjusted": False, "filtered": False, "drawn": False}
    assert needs([]) == off
    assert needs([SamplingParams(temperature=0, top_k=5, top_p=0.5)]) == off
    assert needs([SamplingParams()]) == off | {"drawn": True}
    for filters in ({"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}):
        assert needs([SamplingParams(), SamplingParams(**filters)]) == off | {"drawn": True, "filtered": True}
    for change in ({"logit_bias": {1: 1}}, {"presence_penalty": 1}, {"frequency_penalty": 1},
                   {"repetition_penalty": 2}, {"min_tokens": 1}):  # fmt: skip
        assert needs([SamplingParams(temperature=0, **change)]) == off | {"adjusted": True}
    assert needs([SamplingParams(temperature=0, min_tokens=1, ignore_eos=True)]) == off
