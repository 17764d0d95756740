"""The promises of the HTTP and gateway contract, each with the tests that are named after it."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

HTTP = """
every endpoint of the gateway exists
  promises/test_services.py test_every_endpoint_of_the_gateway_exists
every endpoint of the inference service exists
  promises/test_services.py test_every_endpoint_of_the_inference_service_exists
every response, errors and streams included, carries the x-headgate headers and x-request-id
  integration/test_gateway_http.py test_every_response_has_the_headers_of_the_gateway
the tier header says local, local-fallback, cloud or none; the body names the model that answered
  promises/test_streams.py test_model_in_the_body_is_the_one_that_answers
  integration/test_gateway_cloud.py test_cloud_answers_whole_and_streamed_when_the_local_tier_is_down
x-headgate-policy keeps a request local; a key caps its priority
  integration/test_gateway_http.py test_provider_without_a_key_is_skipped_and_local_only_requests_stay_local
  integration/test_gateway_limits.py test_priority_of_a_request_is_limited_by_its_key
events begin with a snapshot, have numbers and keep-alives
  promises/test_services.py test_events_begin_with_a_snapshot_have_numbers_and_keep_alives
loading a model never makes the service unready
  promises/test_services.py test_loading_a_model_never_makes_the_service_unready
health is false at CRITICAL pressure, livez is not
  integration/test_inference_memory_routes.py test_health_names_the_full_device_and_the_users_of_its_memory
every error is an envelope with message, type, param and code; Anthropic's on /v1/messages
  promises/test_errors.py test_every_error_has_message_type_param_and_code
  promises/test_errors.py test_messages_has_anthropics_envelope
Retry-After is the known time
  promises/test_errors.py test_retry_after_of_the_tier_is_passed_on
  unit/test_gateway_chain.py test_retry_after_has_a_default_for_each_reason
x-should-retry is false if a retry cannot succeed, or the budget is spent
  promises/test_errors.py test_should_retry_is_false_if_a_retry_cannot_succeed
  integration/test_gateway_budget.py test_request_without_attempts_left_is_answered_with_x_should_retry_false
every code has its status
  promises/test_errors.py test_every_code_has_the_status_of_the_contract
context_length_exceeded names both lengths
  unit/test_gateway_prompt_length.py test_reasons_contain_the_numbers
memory_limit_exceeded has numbers in its message and its details
  promises/test_errors.py test_memory_refusal_has_its_numbers_in_the_message_and_in_the_details
bad input is a 400, never a 422 or a 500
  promises/test_errors.py test_invalid_input_is_a_400
  integration/test_gateway_http.py test_invalid_input_is_a_4xx_with_the_parameter
status and headers go out with the first content delta
  promises/test_streams.py test_status_and_headers_are_sent_with_the_first_content_delta
  integration/test_gateway_failover.py test_status_is_sent_with_the_first_token
local requests are always streamed on the inference hop
  promises/test_streams.py test_local_requests_are_always_streamed_on_the_inference_hop
progress comes at least every two seconds
  promises/test_services.py test_progress_is_sent_at_least_every_two_seconds
comments are forwarded for the last candidate only
  promises/test_streams.py test_progress_comments_of_a_tier_that_is_not_the_last_are_not_forwarded
  integration/test_gateway_failover.py test_progress_comments_of_the_last_tier_are_forwarded_after_a_delay
a reasoning delta is content
  promises/test_streams.py test_reasoning_delta_is_content
an empty answer with a finish reason is an answer
  promises/test_streams.py test_empty_answer_with_a_finish_reason_is_an_answer
one id and created for all chunks
  promises/test_streams.py test_all_chunks_share_one_id_and_created
the role is in the first delta
  promises/test_streams.py test_role_is_in_the_first_delta_only
usage is sent only if requested, last, with empty choices
  promises/test_streams.py test_usage_is_sent_only_if_requested_last_and_without_choices
no id and no retry lines
  promises/test_streams.py test_streams_have_no_id_and_no_retry_lines
a stream without a finish reason never ends in [DONE]
  promises/test_streams.py test_stream_without_finish_reason_never_ends_in_done
it is resumed, or ends in an error frame
  integration/test_gateway_resume.py test_same_model_resumes_as_one_answer
  integration/test_gateway_resume.py test_answer_that_cannot_be_resumed_ends_in_an_error_frame
"""

GATEWAY = """
each observation has its verdict: success, failure with a scope, or ignore
  unit/test_gateway_outcome.py test_each_observation_has_its_verdict
  promises/test_gateway.py test_errors_that_are_not_failures_of_the_tier_open_no_breaker
a tier that the fit check skips has no outcome
  promises/test_gateway.py test_tier_skipped_by_the_fit_check_has_no_outcome
a client disconnect changes no breaker
  integration/test_gateway_failover.py test_client_disconnect_closes_the_upstream_without_a_failure
an invalid provider key is not an error of the client; the operator sees it
  promises/test_errors.py test_invalid_key_of_a_provider_is_not_a_401_of_the_client
  unit/test_gateway_outcome.py test_rejected_credentials_or_payment_need_the_operator
429 opens the breaker of a deployment for its Retry-After
  unit/test_gateway_breakers.py test_429_opens_breaker_for_its_retry_after
breakers have two scopes, and both permits are needed
  unit/test_gateway_breakers.py test_provider_breaker_covers_all_its_models
  unit/test_gateway_breakers.py test_provider_probe_is_returned_when_model_breaker_refuses
a cancelled probe returns its permit; a lost one expires
  unit/test_gateway_breakers.py test_cancelled_probe_returns_its_permit
  unit/test_gateway_breakers.py test_lost_probe_expires
five consecutive failures, or the ratio, open a breaker; half-open admits one probe
  unit/test_gateway_breakers.py test_five_failures_in_a_row_open_breaker_and_half_open_admits_one_probe
  unit/test_gateway_breakers.py test_high_share_of_failures_opens_breaker
one transport failure of the inference service starts confirmation probes
  unit/test_gateway_prober.py test_failure_is_confirmed_every_quarter_second_until_an_answer
  unit/test_gateway_prober.py test_one_failure_and_four_probes_open_breaker_of_dead_service
readiness ends the open period early
  unit/test_gateway_breakers.py test_good_recovery_probe_ends_open_period_and_one_request_probes
a probe never loads, evicts or counts as use; a cold model that fits answers `cold`
  integration/test_inference_probes.py test_probe_of_a_cold_model_is_answered_without_a_load
  integration/test_inference_probes.py test_probe_of_a_ready_model_does_not_count_as_use
after a memory refusal the probe is the plan
  unit/test_gateway_prober.py test_memory_refusal_is_probed_by_plan
paid providers are never probed
  unit/test_gateway_prober.py test_clouds_are_never_probed
a ramp follows recovery
  unit/test_gateway_breakers.py test_ramp_after_recovery_grows_with_successes_and_time
outcomes are recorded synchronously, no breaker is held across an await
  promises/test_gateway.py test_outcomes_are_recorded_synchronously_and_no_breaker_is_held_across_an_await
  unit/test_gateway_breakers.py test_cancelled_attempts_and_late_results_change_nothing
the chain drops candidates with a recorded reason
  unit/test_gateway_chain.py test_facts_drop_or_keep_a_candidate
  unit/test_gateway_chain.py test_order_is_kept_and_drops_have_reasons
local/smaller is the largest other local chat model that is ready or fits at its turn; headers and record name it
  integration/test_e2e_memory.py test_smaller_model_answers_for_one_that_does_not_fit
  integration/test_gateway_smaller.py test_smaller_model_is_chosen_by_the_state_when_its_turn_comes
  integration/test_gateway_smaller.py test_largest_other_model_answers_and_is_named
tokens are counted only near the context length
  unit/test_gateway_prompt_length.py test_only_prompts_near_the_context_length_are_counted
one budget of attempts and time per request
  unit/test_gateway_budget.py test_budget_limits_attempts_and_time
the total deadline limits the time to commit; afterwards only inter_token applies
  integration/test_gateway_failover.py test_total_deadline_limits_the_time_to_commit_over_all_tiers
  promises/test_gateway.py test_total_deadline_does_not_apply_after_the_commit
  promises/test_gateway.py test_silence_after_the_commit_is_limited_by_inter_token
a shorter client timeout shortens the allowed silence
  unit/test_gateway_budget.py test_gap_in_an_answer_is_at_most_the_clients_read_timeout
progress extends first_token up to load_wait, and spilling is no failure
  integration/test_gateway_failover.py test_slow_load_with_progress_is_no_failure
  integration/test_gateway_failover.py test_long_load_spills_to_the_next_candidate_without_a_failure
the chain is the only retry loop
  contract/test_providers.py test_error_status_is_raised_on_entering_and_not_retried
an answer resumes on the same model, then another local one, then a cloud
  integration/test_gateway_resume.py test_same_model_resumes_as_one_answer
  integration/test_gateway_resume.py test_another_local_model_resumes_when_the_same_one_cannot
  integration/test_gateway_resume.py test_cloud_gets_an_instruction_to_continue
at most two hops, text with a single choice only
  integration/test_gateway_resume.py test_answer_is_resumed_twice_at_most
  integration/test_gateway_resume.py test_broken_answer_of_a_request_that_excludes_a_resume_ends_in_an_error_frame
requests in flight and in the queue are limited, by priority
  property/test_gateway_admission.py test_request_of_high_priority_starts_first_and_replaces_the_lowest_in_a_full_queue
  integration/test_gateway_failover.py test_requests_beyond_the_limits_wait_and_are_then_rejected
limits per key hold
  unit/test_gateway_limits.py test_limits_hold_in_each_interval_and_waits_are_exact
a request spills to the next tier when its wait would be too long
  integration/test_gateway_choice.py test_candidate_is_deferred_when_its_predicted_wait_is_too_long
HTTP clients are created in one module
  promises/test_gateway.py test_http_clients_are_created_in_one_module
images are downloaded from listed hosts only
  integration/test_gateway_images.py test_no_url_is_fetched_by_default
  unit/test_gateway_images.py test_without_listed_hosts_all_addresses_are_rejected
the Host is checked on loopback
  integration/test_gateway_http.py test_only_loopback_host_names_are_served_on_loopback
bodies, headers and nesting are limited
  integration/test_gateway_http.py test_body_beyond_the_limit_is_413_with_and_without_a_content_length
  integration/test_gateway_http.py test_headers_beyond_the_limit_are_refused
  integration/test_gateway_http.py test_invalid_input_is_a_4xx_with_the_parameter
"""

LEDGER = """
a reservation is made before a process starts
  promises/test_ledger.py test_memory_is_reserved_before_a_process_starts
a reservation is released exactly once on every path
  promises/test_ledger.py test_memory_is_released_however_a_worker_ends
"""


def promises() -> list[tuple[str, list[tuple[str, str]]]]:
    """Each promise with the files and names of its tests."""
    found: list[tuple[str, list[tuple[str, str]]]] = []
    for line in (HTTP + GATEWAY + LEDGER).splitlines():
        if line.startswith("  "):
            file, name = line.split()
            found[-1][1].append((file, name))
        elif line:
            found.append((line, []))
    return found


@functools.cache
def names_in(file: str) -> frozenset[str]:
    """The tests in a file."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, functions) and node.name.startswith("test_"))


@pytest.mark.parametrize(("promise", "tests"), promises(), ids=[promise for promise, _ in promises()])
def test_promise_has_a_test(promise: str, tests: list[tuple[str, str]]) -> None:
    """Rename a test here too; a removed test needs a replacement."""
    assert tests, promise
    assert [name for file, name in tests if name not in names_in(file)] == []


def test_every_promise_test_is_listed() -> None:
    """Every test in this folder belongs to a promise."""
    listed = {name for _, tests in promises() for _, name in tests}
    here = {path.relative_to(TESTS).as_posix() for path in Path(__file__).parent.glob("test_*.py")} - {
        Path(__file__).relative_to(TESTS).as_posix()
    }
    assert {name for file in here for name in names_in(file)} - listed == set()
