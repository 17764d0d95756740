"""The index of prefixes finds the nodes with the longest beginning of a prompt, within its bounds."""

from __future__ import annotations

from gateway.nodes.prefix_blocks import PrefixBlocks
from gateway.nodes.prefix_index import LAST_BLOCKS, MAX_NODES, PrefixIndex
from gateway.nodes.prefixes import Prefixes

LONG = PrefixBlocks(("h1", "h2", "h3", "h4"), (10, 20, 30, 40), 1)


def test_the_longest_beginning_of_each_node_counts() -> None:
    index = PrefixIndex()
    index.note("a", ["h1", "h2", "h3"])
    index.note("b", ["h1", "x2"])
    assert index.best(LONG) == {"a": 30, "b": 10}
    assert list(index.best(LONG)) == ["a", "b"]


def test_of_a_long_prompt_the_end_and_some_of_the_beginning_are_remembered() -> None:
    index = PrefixIndex()
    count = 100
    prompt = PrefixBlocks(tuple(f"h{place}" for place in range(count)), tuple(range(1, count + 1)), 1)
    index.note("a", prompt.hashes)
    for length in range(1, count + 1):
        beginning = PrefixBlocks(prompt.hashes[:length], prompt.end_bytes[:length], 1)
        found = index.best(beginning)["a"]
        assert length / 2 < found <= length
        assert found == length or length <= count - LAST_BLOCKS


def test_events_of_a_node_correct_the_estimate() -> None:
    index = PrefixIndex()
    index.note("a", ["h1", "h2"])
    index.removed("a", ["h2", "unknown"])
    index.removed("unknown", ["h1"])
    assert index.best(LONG) == {"a": 10}
    index.stored("a", ["h4"])
    assert index.best(LONG) == {"a": 40}
    index.replace("a", ["h3"])
    assert index.best(LONG) == {"a": 30}
    index.note("b", ["h3"])
    index.forget("a")
    index.forget("a")
    assert index.best(LONG) == {"b": 30}


def test_snapshot_of_a_node_replaces_what_was_expected_of_it() -> None:
    prefixes = Prefixes("secret")
    prefixes.note("a", LONG)
    prefixes.apply("a", "snapshot", {"models": []})
    assert prefixes.index.best(LONG) == {"a": 40}, "a service that does not report labels"
    prefixes.apply("a", "snapshot", {"kv": {"m": ["h1"], "n": ["h2"]}})
    assert prefixes.index.best(LONG) == {"a": 20}
    prefixes.apply("a", "kv", {"model": "m", "added": ["h3"], "removed": ["h1"]})
    prefixes.apply("a", "beat", {})
    assert prefixes.index.best(LONG) == {"a": 30}


def test_what_was_not_used_for_longest_is_forgotten_first() -> None:
    index = PrefixIndex(blocks_per_node=3)
    index.note("a", ["h1", "h2"])
    index.note("a", ["x1"])
    index.note("a", ["h1"])
    index.note("a", ["x2"])
    assert index.best(LONG) == {"a": 10}
    index.note("a", ["h1", "h2", "h3", "h4"])
    assert index.best(LONG) == {"a": 30}


def test_the_bound_of_all_blocks_is_divided_among_the_nodes() -> None:
    index = PrefixIndex(max_blocks=4)
    index.note("a", ["h1", "h2", "h3"])
    index.note("b", ["x1"])
    index.note("a", ["h1", "h2", "h3"])
    assert index.best(LONG) == {"a": 20}


def test_a_beginning_that_many_nodes_have_is_credited_to_the_nodes_in_question() -> None:
    index = PrefixIndex()
    for number in range(100):
        index.note(f"n{number}", ["h1"])
    index.note("n3", ["h1", "h2"])
    found = index.best(LONG, ["n7", "n3", "other"])
    assert (found["n3"], found["n7"], "other" in found) == (20, 10, False)
    assert len(found) <= MAX_NODES + 2
    assert len(index.best(LONG)) == MAX_NODES
