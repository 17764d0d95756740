"""What `oom_policy: reduce` tries, in which order, how often, and how long it rests from it."""

from __future__ import annotations

from inference.authority.placement.reduction import (
    LEAST_CONTEXT,
    LEAST_UBATCH,
    REST_SECONDS,
    Descent,
    Step,
    next_step,
    smaller_context,
    smaller_ubatch,
)


def test_each_step_is_taken_once_in_order() -> None:
    """Clean up, then a smaller batch, then a smaller context, and then nothing more."""
    descent = Descent()
    taken = []
    for _ in Step:
        descent, step = next_step(descent, 10.0)
        taken.append(step)
    assert taken == [Step.CLEAN, Step.UBATCH, Step.CONTEXT]
    assert next_step(descent, 20.0) == (descent, None)


def test_a_death_while_computing_is_not_met_with_cleaning_alone() -> None:
    """The same sizes would kill the next requests as well."""
    _, step = next_step(Descent(), 0.0, without=(Step.CLEAN,))
    assert step is Step.UBATCH


def test_every_step_begins_the_rest_anew() -> None:
    """After the last one the configured sizes are left alone for as long."""
    descent, _ = next_step(Descent(), 5.0)
    descent, _ = next_step(descent, 9.0)
    assert descent.rest(10.0) == REST_SECONDS - 1
    assert descent.rested(10.0) is descent
    assert descent.rest(9.0 + REST_SECONDS) == 0
    assert descent.rested(9.0 + REST_SECONDS) == Descent()


def test_sizes_get_no_smaller_than_what_is_of_use() -> None:
    """A quarter of the batch, half of the context, and None where there is nothing to gain."""
    assert [smaller_ubatch(count) for count in (512, 64, LEAST_UBATCH, 1)] == [128, LEAST_UBATCH, None, None]
    assert [smaller_context(count) for count in (4096, 300, LEAST_CONTEXT)] == [2048, LEAST_CONTEXT, None]
