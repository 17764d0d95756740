"""Properties of the choice of a node, of the blocks of prompts and of their index."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import BODIES
from gateway.nodes.node_choice import LOAD_BOUND, ChosenNode, NodeFacts, NodeNeeds, choose, load_bound
from gateway.nodes.prefix_blocks import BLOCK_BYTES, PrefixBlocks, prefix_blocks
from gateway.nodes.prefix_index import PrefixIndex
from gateway.providers.local.candidate_facts import LikelyFailure, Speed

SECONDS = st.one_of(st.none(), st.sampled_from([0.0, 0.01, 0.5, 3.0, 40.0]))
SPEEDS = st.builds(Speed, SECONDS, SECONDS, st.one_of(st.none(), st.sampled_from([500.0, 2000.0])))
FACTS = st.builds(
    NodeFacts,
    name=st.just(""),
    excluded=st.one_of(st.none(), st.none(), st.just("an attempt failed")),
    listed=st.sampled_from([True, True, True, False]),
    breaker_open_for=st.one_of(st.none(), st.none(), st.just(3.0)),
    queue_full_for=st.one_of(st.none(), st.none(), st.just(2.0)),
    capabilities=st.sampled_from([None, ("chat",), ("embeddings",)]),
    context_length=st.sampled_from([None, 500, 8192]),
    fits=st.sampled_from([None, True, True, False]),
    likely_failure=st.one_of(st.none(), st.none(), st.builds(LikelyFailure, st.just("it failed"))),
    speed=SPEEDS,
    in_flight=st.integers(0, 9),
    parallel=st.integers(1, 4),
    node_load=st.sampled_from([0.0, 1.0, 4.0, 20.0]),
    cached_tokens=st.integers(0, 1000),
)
NODES = st.lists(FACTS, max_size=6).map(
    lambda found: [facts._replace(name=f"n{number}") for number, facts in enumerate(found)]
)
NEEDS = NodeNeeds(1000, frozenset(("chat",)))


def is_excluded(node: NodeFacts) -> bool:
    return (
        node.excluded is not None
        or not node.listed
        or node.breaker_open_for is not None
        or node.queue_full_for is not None
        or node.capabilities == ("embeddings",)
        or node.fits is False
    )


@given(NODES, st.integers())
def test_an_excluded_node_is_not_chosen_and_has_a_reason(nodes: list[NodeFacts], seed: int) -> None:
    found = choose(nodes, NEEDS, random.Random(seed).random)
    usable = {node.name for node in nodes if not is_excluded(node)}
    if isinstance(found, ChosenNode):
        assert {found.name, *found.others} == usable
    else:
        assert not usable
        assert set(found.reasons) == {node.name for node in nodes}
    assert choose(nodes, NEEDS, random.Random(seed).random) == found


@given(NODES, st.integers(), st.integers(1, 1000))
def test_more_cached_tokens_never_make_a_node_less_preferred(nodes: list[NodeFacts], seed: int, more: int) -> None:
    found = choose(nodes, NEEDS, random.Random(seed).random)
    if isinstance(found, ChosenNode):
        better = [
            node._replace(cached_tokens=node.cached_tokens + more) if node.name == found.name else node
            for node in nodes
        ]
        again = choose(better, NEEDS, random.Random(seed).random)
        assert isinstance(again, ChosenNode)
        assert again.name == found.name
        assert again.ttft_seconds <= found.ttft_seconds


@given(
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from([0.0, 5.0, 30.0]), st.integers(0, 1000)), min_size=1),
    st.integers(),
)
def test_load_of_the_chosen_node_is_bounded_while_another_node_has_a_free_slot(
    given: list[tuple[int, float, int]], seed: int
) -> None:
    nodes = [
        NodeFacts(f"n{number}", speed=Speed(0.0, 0.0, 1000.0), in_flight=load, parallel=4, node_load=all_models,
                  cached_tokens=cached)
        for number, (load, all_models, cached) in enumerate(given)
    ]  # fmt: skip
    found = choose(nodes, NEEDS, random.Random(seed).random)
    assert isinstance(found, ChosenNode)
    chosen = next(node for node in nodes if node.name == found.name)
    mean = sum(node.node_load for node in nodes) / len(nodes)
    if any(node.load < 1 and node.node_load <= load_bound(mean) for node in nodes):
        assert chosen.node_load <= load_bound(mean)
        total = sum(node.in_flight for node in nodes) + 1
        assert chosen.load < 1 or chosen.load <= LOAD_BOUND * total / (4 * len(nodes))


MESSAGES = st.lists(
    st.fixed_dictionaries({
        "role": st.sampled_from(["system", "user", "assistant"]),
        "content": st.one_of(
            st.text(max_size=20),
            st.integers(0, 3000).map("x".__mul__),
            st.text(max_size=9).map(lambda text: [{"type": "text", "text": text}]),
        ),
    }),
    min_size=1,
    max_size=5,
)  # fmt: skip


def blocks_of(messages: list[dict[str, object]]) -> PrefixBlocks:
    body = BODIES[Endpoint.CHAT][1]({"model": "m", "messages": messages})
    blocks = prefix_blocks(b"salt", body)
    assert blocks is not None
    return blocks


@given(MESSAGES, MESSAGES)
def test_the_blocks_of_a_conversation_begin_those_of_its_continuation(
    messages: list[dict[str, object]], more: list[dict[str, object]]
) -> None:
    first, second = blocks_of(messages), blocks_of(messages + more)
    count = len(first.hashes)
    assert len(messages) <= count == len(first.end_bytes)
    assert second.hashes[:count] == first.hashes
    assert second.end_bytes[:count] == first.end_bytes
    if any(message["role"] == "user" for message in messages):
        assert first.conversation == second.conversation
    starts = (0, *second.end_bytes)
    assert all(0 < end - start <= BLOCK_BYTES for start, end in zip(starts, second.end_bytes, strict=False))
    assert len(set(second.hashes)) == len(second.hashes)


PROMPTS = st.lists(st.sampled_from("ab"), min_size=1, max_size=6).map(
    lambda letters: PrefixBlocks(
        tuple("".join(letters[: end + 1]) for end in range(len(letters))), tuple(range(1, len(letters) + 1)), 1
    )
)
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["note", "stored", "removed", "forget"]), st.sampled_from("xyz"), PROMPTS)
)


@given(OPERATIONS, PROMPTS)
@settings(max_examples=60)
def test_index_gives_the_longest_prefix_that_each_node_has(
    operations: list[tuple[str, str, PrefixBlocks]], prompt: PrefixBlocks
) -> None:
    index, known = PrefixIndex(), dict[str, set[str]]()
    for what, node, blocks in operations:
        if what == "forget":
            index.forget(node)
            known.pop(node, None)
        else:
            getattr(index, what)(node, blocks.hashes)
            held = known.setdefault(node, set())
            held.difference_update(blocks.hashes)
            held.update(blocks.hashes if what != "removed" else ())
    expected = {
        node: max(end for hash, end in zip(prompt.hashes, prompt.end_bytes, strict=True) if hash in held)
        for node, held in known.items()
        if held.intersection(prompt.hashes)
    }
    assert index.best(prompt) == expected
    assert list(index.best(prompt).values()) == sorted(expected.values(), reverse=True)


@given(OPERATIONS)
@settings(max_examples=60)
def test_index_keeps_a_bounded_number_of_blocks_per_node(operations: list[tuple[str, str, PrefixBlocks]]) -> None:
    index = PrefixIndex(blocks_per_node=3)
    for what, node, blocks in operations:
        getattr(index, what)(*((node,) if what == "forget" else (node, blocks.hashes)))
    prompts = [PrefixBlocks((hash,), (1,), 1) for _, _, blocks in operations for hash in blocks.hashes]
    for node in "xyz":
        assert len({prompt.hashes for prompt in prompts if index.best(prompt, [node]).get(node)}) <= 3
