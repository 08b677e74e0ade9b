"""Exercises: right answers, held-out material apart, exact judging."""

import dataclasses
import json
import random
import re

import pytest

from flint_jax import evals
from flint_jax.evals import HELD_OUT, TRAIN, suite

MAKERS = (evals.arithmetic, evals.lists, evals.memory, evals.telling, evals.talk, evals.call, evals.result)


@pytest.mark.parametrize("split", [TRAIN, HELD_OUT])
def test_arithmetic_is_right(split):
    rng = random.Random(1)
    for _ in range(500):
        item = evals.arithmetic(rng, split)
        signs = {"plus": "+", "minus": "-", "times": "*"}
        a, sign, b = re.search(r"(\d+) ?([-+*]|plus|minus|times) ?(\d+)", item.messages[0]["content"]).groups()
        sign = signs.get(sign, sign)
        assert item.content == str({"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign])
        steps = re.findall(r"(\d+) ([-+*]) (\d+) ([-+]) (\d+) = (\d+)", item.thought)
        assert bool(steps) == item.thinking
        for x, op, y, op2, z, result in steps:
            first = {"+": int(x) + int(y), "-": int(x) - int(y), "*": int(x) * int(y)}[op]
            assert (first + int(z) if op2 == "+" else first - int(z)) == int(result)


def test_lists_are_right():
    rng = random.Random(2)
    for _ in range(300):
        item = evals.lists(rng, TRAIN)
        shown = re.findall(r"(?:\w+, )+\w+", item.messages[0]["content"])[-1].split(", ")
        match item.detail:
            case "reverse":
                assert item.content == ", ".join(shown[::-1])
            case "sort":
                assert item.content == ", ".join(sorted(shown, key=int))
            case "count":
                assert item.content == str(len(shown))
            case "largest":
                assert item.content == max(shown, key=int)
            case _:
                assert item.content in shown


def test_a_fact_is_in_its_record():
    rng = random.Random(3)
    for _ in range(100):
        item = evals.record(rng, HELD_OUT, 12)
        name, value = re.search(r"of (\w+) is (\d+)\.", item.content).groups()
        lines = [line for line in item.messages[0]["content"].split("\n")[1:-1] if name in line and value in line]
        assert len(lines) == 1


def test_held_out_words_are_never_trained_on():
    def words(split):
        rng = random.Random(4)
        return {w for _ in range(60) for w in re.findall(r"of (\w+)", evals.record(rng, split, 20).content)}

    trained, asked = words(TRAIN), words(HELD_OUT)
    assert trained
    assert asked
    assert not trained & asked


def test_held_out_questions_are_never_trained_on():
    rng = random.Random(5)
    for make in (evals.arithmetic, evals.talk):
        trained = {make(rng, TRAIN).messages[-1]["content"] for _ in range(3000)}
        asked = {make(rng, HELD_OUT).messages[-1]["content"] for _ in range(300)}
        assert not trained & asked


def test_calls_fit_their_schemas():
    rng = random.Random(6)
    kinds = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list}
    seen = set()
    for _ in range(300):
        item = evals.call(rng, TRAIN)
        parameters = {t["function"]["name"]: t["function"]["parameters"] for t in item.tools}
        schemas = {name: one["properties"] for name, one in parameters.items()}
        for name, arguments in item.calls:
            assert set(parameters[name]["required"]) <= set(arguments) <= set(schemas[name])
            for key, value in arguments.items():
                assert type(value) is kinds[schemas[name][key]["type"]]
                seen.add(schemas[name][key]["type"])
    assert seen == set(kinds)


def test_results_are_in_the_answer():
    rng = random.Random(7)
    for _ in range(50):
        item = evals.result(rng, HELD_OUT)
        for message in item.messages:
            if message["role"] == "tool":
                told = message["content"]
                fields = json.loads(told).items() if told.startswith("{") else ()
                for key, value in fields:
                    assert f"{key} is {value}" in item.content
                assert fields or told in item.content


def test_judging_is_exact():
    item = evals.Item("tools", "x", (), calls=(("f", {"a": 1, "b": ["x"]}),))
    assert item.right("whatever", [("f", {"b": ["x"], "a": 1})])
    for wrong in ({"a": 1.0, "b": ["x"]}, {"a": True, "b": ["x"]}, {"a": 1}, {"a": 1, "b": ["y"]}):
        assert not item.right("", [("f", wrong)])
    assert not item.right("", [("g", {"a": 1, "b": ["x"]})])
    assert not item.right("", [])
    plain = evals.Item("talk", "x", (), "Hello.")
    assert plain.right(" Hello.\n", [])
    assert not plain.right("Hello", [])
    assert not plain.right(None, [])
    assert not plain.right("Hello.", [("f", {})])


def test_items_are_the_same_for_the_same_seed_and_lengths_follow_distances():
    names = list(suite.NAMES)
    assert suite.items(names, 3, seed=1) == suite.items(names, 3, seed=1) != suite.items(names, 3, seed=2)

    def length(item):
        return len(item.messages[0]["content"]) // 2

    for item in suite.items(["look-up"], 3, distances=(300, 1500), length=length):
        wanted = int(item.detail.split()[0])
        assert 0.7 * wanted < length(item) < 1.3 * wanted
    with pytest.raises(ValueError, match="unknown families poetry"):
        suite.items(["poetry"], 1)


def test_the_table_counts():
    items = [evals.Item("a", "x", (), "1"), evals.Item("a", "y", (), "2"), evals.Item("b", "z", (), "3")]
    replies = [
        suite.Reply("1", [], "stop", True),
        suite.Reply("1", [], "stop", False),
        suite.Reply("3", [], "stop", True),
    ]
    rows = {(r.family, r.detail): (r.items, r.right, r.well_formed) for r in suite.table(items, replies)}
    assert rows == {("a", "all"): (2, 1, 1), ("a", "x"): (1, 1, 1), ("a", "y"): (1, 0, 0), ("b", "z"): (1, 1, 1)}
    quiet = dataclasses.replace(items[1], thinking=False)  # thinks all the same, which counts nowhere here
    thinkers = [dataclasses.replace(r, thought=t) for r, t in zip(replies, (True, True, False), strict=True)]
    made = suite.table([items[0], quiet, items[2]], thinkers)
    rows = {(r.family, r.detail): (r.asked_to_think, r.thought) for r in made}
    assert rows == {("a", "all"): (1, 1), ("a", "x"): (1, 1), ("a", "y"): (0, 0), ("b", "z"): (1, 0)}
    failed = suite.Reply("1", [], "error", False, "500: broken")
    assert suite.table(items[:1], [failed])[0].right == 0
