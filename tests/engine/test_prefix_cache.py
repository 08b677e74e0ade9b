"""What the prefix cache finds, keeps and gives up: pages of 4 tokens, a window of 3 in rings of 8, contents checked."""

import pytest

from flint_jax.plan import Request
from tests.engine.test_scheduler import PAGE, RING, WINDOW, Rig, solo

SLACK = RING - WINDOW + 1  # positions that a snapshot reaches back once its ring has wrapped


class Chat(Rig):
    """A rig with more room; ``say`` runs one request to its end."""

    def __init__(self, slots=4, pages=200, snapshots=16, **more):
        super().__init__(slots, pages, more.pop("chunks", (8,)), snapshots=snapshots, **more)
        self.count = 0

    def put(self, prompt, new=1, **how):
        self.count += 1
        return self.add(Request(f"r{self.count}", tuple(prompt), len(prompt) + new, **how))

    def say(self, prompt, new=1, **how):
        """The request, ended; its ``prefilled`` tokens are the rig's ``cost``."""
        before = self.scheduler.prefilled
        request = self.put(prompt, new, **how)
        self.run()
        assert request.output == solo(request)
        self.cost = self.scheduler.prefilled - before
        return request


def ids(count, seed=0):
    return [(7 * i + 3 * seed + i // 5) % 90 for i in range(count)]


@pytest.mark.parametrize("turn", [1, 2, 3, 6, 9])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 31, 32, 33])
def test_a_next_turn_prefills_only_what_is_new(length, turn):
    """Shorter and longer than the window and the ring, ends on, before and behind the edge of a page."""
    chat = Chat()
    said = chat.say(ids(length), turn)
    for n in (2, 5, 4):
        history = [*said.prompt, *said.output]
        said = chat.say([*history, *ids(n, seed=n)], turn)
        # The last token of a reply was drawn, but never went through the model.
        assert said.cached == len(history) - 1
        assert chat.cost == n + 1
    assert chat.scheduler.hits == chat.scheduler.queries - chat.scheduler.prefilled


@pytest.mark.parametrize("length", [5, 8, 30, 32])
def test_the_same_prompt_again_computes_its_last_token_only(length):
    chat = Chat()
    chat.say(ids(length))
    again = chat.say(ids(length))
    assert (again.cached, chat.cost) == (length - 1, 1)


@pytest.mark.parametrize("back", range(1, SLACK + 3))
def test_a_turn_that_differs_in_its_last_tokens_is_taken_up_where_it_differs(back):
    """The ring reaches back a few positions; further, only an earlier snapshot helps."""
    chat = Chat(interval=20)
    chat.say(ids(30))
    other = chat.say([*ids(30)[: 30 - back], 95, *ids(9, 1)])
    assert other.cached == (30 - back if back <= SLACK else 20)


def test_prompts_shorter_than_the_ring_are_taken_up_anywhere():
    for cut in range(1, RING):
        chat = Chat()
        chat.say(ids(RING))
        assert chat.say([*ids(RING)[:cut], 95, 96, 97]).cached == cut


def test_a_branch_seen_twice_is_kept_for_the_third():
    chat = Chat(interval=1000)
    system = ids(42)
    assert chat.say([*system, *ids(20, 1)]).cached == 0
    assert chat.say([*system, 95, *ids(20, 2)]).cached == 0  # finds pages, but no window: leaves a snapshot there
    assert chat.say([*system, 96, *ids(20, 3)]).cached == 40


def test_a_long_prompt_is_kept_on_its_way():
    chat = Chat(interval=16)
    request = chat.put(ids(100), 5)
    while request.prefilled < 50:
        chat.step()
    chat.end(request)
    assert chat.say(ids(100)).cached == 56
    assert len([s for s in chat.scheduler.cache.snapshots.values() if s.passing]) <= 16 // 4


def test_salts_do_not_meet():
    chat = Chat()
    chat.say(ids(30), salt="a")
    assert chat.say(ids(30)).cached == 0
    assert chat.say(ids(30), salt="b").cached == 0
    assert chat.say(ids(30), salt="a").cached == 29


def test_a_request_can_do_without_and_still_serves_others():
    chat = Chat()
    chat.say(ids(30))
    queries = chat.scheduler.queries
    assert chat.say(ids(31), reuse=False).cached == 0
    assert chat.scheduler.queries == queries
    assert chat.say(ids(31)).cached == 30


def test_without_snapshots_nothing_is_kept():
    chat = Chat(snapshots=0)
    chat.say(ids(30))
    assert chat.say(ids(30)).cached == 0
    assert len(chat.scheduler.pool.free) == chat.scheduler.pages
    assert chat.scheduler.queries == 0


def test_what_failed_is_forgotten_with_all_it_came_from():
    chat = Chat()
    chat.say(ids(30), 2)
    bad = chat.put([*ids(30), 95, 96], 4)
    chat.step()
    chat.step()
    assert bad.cached == 30
    chat.end(bad, keep=False)
    assert chat.say([*ids(30), 95, 96, 97]).cached == 0


def test_what_is_computed_again_takes_nothing_from_the_cache():
    chat = Chat()
    chat.say(ids(30))
    request = chat.put([*ids(30), 95], 4)
    chat.step()
    assert request.taken == 30
    assert chat.scheduler.retry(request)
    assert not request.reuse
    chat.step()
    assert (request.prefilled, request.taken) == (8, 0)
    assert not chat.scheduler.retry(request)  # it would fail again
    chat.run()
    assert request.output == solo(request)


# -- company -----------------------------------------------------------------------------------------------------------


def test_copies_of_a_prompt_wait_for_the_first():
    chat = Chat()
    requests = [chat.put(ids(50), 3) for _ in range(4)]
    chat.run()
    assert [r.cached for r in requests] == [0, 49, 49, 49]
    assert chat.scheduler.prefilled == 50 + 3


def test_prompts_with_a_common_beginning_wait_for_it_and_no_longer():
    chat = Chat()
    first = chat.put([*ids(42), *ids(60, 1)])
    second = chat.put([*ids(42), 95, *ids(20, 2)])
    other = chat.put(ids(30, 3))
    chat.step()
    assert (first.slot is not None, second.slot, other.slot is not None) == (True, None, True)
    while second.slot is None:
        chat.step()
    assert not first.decoding
    chat.run()
    assert (first.cached, second.cached) == (0, 40)


def test_nobody_waits_for_a_leader_that_left():
    chat = Chat()
    first, second = chat.put(ids(100)), chat.put(ids(100))
    chat.step()
    chat.end(first)
    chat.step()
    assert second.cached == 8
    chat.run()


def test_nobody_waits_for_little():
    chat = Chat()
    chat.put([*ids(2 * PAGE - 1), 90, *ids(50)])
    second = chat.put([*ids(2 * PAGE - 1), 91, *ids(50)])
    chat.step()
    assert second.slot is not None
    chat.run()


def test_a_preempted_request_comes_back_through_the_cache():
    # Two requests that come to need 12 pages, and 11: the younger gives one back and soon has it again.
    chat = Chat(slots=2, pages=11, snapshots=8, lag=0)
    old, young = chat.put(ids(14), 8), chat.put(ids(14, 1), 16)
    while not chat.scheduler.preemptions:
        chat.step()
    had = young.known - 1
    chat.run()
    assert young.output == solo(young)
    assert young.taken == had // PAGE * PAGE > 14
    assert (old.cached, young.cached) == (0, 0)  # what its own return found is not the prompt's


# -- room --------------------------------------------------------------------------------------------------------------


def test_nothing_is_evicted_before_its_room_is_needed():
    chat = Chat(pages=30, snapshots=16)
    for seed in range(3):
        chat.say(ids(24, seed), 4)
    assert chat.scheduler.cache.evictions == 0
    assert [chat.say(ids(24, seed)).cached for seed in range(3)] == [23] * 3
    chat.say(ids(60, 5))
    assert chat.scheduler.cache.evictions > 0


def test_what_was_used_longest_ago_goes_first():
    chat = Chat(pages=22, snapshots=16)  # three conversations of seven pages
    for seed in range(3):
        chat.say(ids(26, seed))
    chat.say(ids(26, 0))
    chat.say(ids(26, 3))
    assert [chat.scheduler.cache.find("", Request("", tuple(ids(26, s)), 27).span, 25).position for s in range(4)] == [
        25,
        0,
        25,
        25,
    ]


def test_being_taken_up_keeps_a_snapshot_young():
    chat = Chat(snapshots=3, interval=1000)
    first, second = ids(12), ids(12, 1)
    chat.say(first)
    chat.say(second)
    chat.say([*first, *ids(20, 2)])
    chat.say(ids(12, 3))  # the fourth: the second goes
    assert chat.say([*first, 95]).cached == 12
    assert chat.say([*second, 95]).cached == 0


def test_prompts_of_one_length_with_different_ends_are_both_kept():
    chat = Chat()
    prompts = [*ids(7), 90, 91, 92], [*ids(7), 93, 94, 95]
    for prompt in prompts:
        chat.say(prompt)
    assert [chat.say(prompt).cached for prompt in prompts] == [9, 9]


def test_few_snapshots_hold_the_last_conversations():
    chat = Chat(snapshots=2)
    for seed in range(3):
        chat.say(ids(20, seed))  # one snapshot each: with one token its prompt's end is its own end
    assert [chat.say(ids(20, s), reuse=False) and len(chat.scheduler.cache.snapshots) for s in range(3)] == [2, 2, 2]
    assert chat.say(ids(20, 2)).cached == 19
    assert chat.say(ids(20, 0)).cached == 0


def test_snapshots_inside_prompts_go_before_those_at_ends():
    chat = Chat(snapshots=8, interval=8)

    def passing():
        return sorted(s.high for s in chat.scheduler.cache.snapshots.values() if s.passing)

    chat.say(ids(20, 1), 3)
    chat.say(ids(60, 2))
    assert passing() == [8, 16, 20, 40]
    for seed in range(3, 8):
        chat.say(ids(6, seed))
    assert passing() == []
    assert chat.scheduler.cache.evictions == 4
    assert chat.say([*ids(20, 1), 95]).cached == 20  # older than the four, but an end


def test_a_cached_prefix_never_stands_in_a_requests_way():
    """A request may have the whole pool: all else is evicted, even what it was taken up from."""
    chat = Chat(pages=10, snapshots=4)
    chat.say(ids(30))
    request = chat.say(ids(30), 10)
    assert request.cached == 29
    assert request.known == chat.scheduler.capacity()
