"""One episode with a fake engine: tokens, masks, stops and failures."""

import asyncio
import json

import numpy as np
import pytest

from actors.agent_loop import run_episode, score_members
from actors.engine import EngineDied
from buffer.messages import StopReason
from tasks import Reward
from tasks.rules import numeric_match
from tests.unit.actors.support import make_lease, make_rollouts, make_task
from toolcall import ToolContext, tool

ROW = {"question": "12 times 7?", "answer": "84"}
CALL, ANSWER = "<calc>12*7</calc>", "<answer>84</answer><|im_end|>"


def roll(rollouts, row=ROW):
    return asyncio.run(run_episode(rollouts, make_lease(), 0, row))


def hermes(expression: str) -> str:
    call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return f"<tool_call>\n{call}\n</tool_call><|im_end|>"


def test_a_call_is_answered_and_the_answer_scored():
    rollouts, _, tokenizer = make_rollouts([CALL, ANSWER])
    finished = roll(rollouts)
    trajectory = finished.trajectory
    assert (trajectory.stop_reason, trajectory.reward, trajectory.error) == (StopReason.ANSWER, 1.0, None)
    assert finished.success
    assert tokenizer.decode(trajectory.token_ids[trajectory.prompt_len :]) == (
        "<calc>12*7</calc>\n<result>84</result>\n<answer>84</answer><|im_end|>"
    )
    assert [call["outcome"] for call in trajectory.turns[0].calls] == ["ok"]


@pytest.mark.parametrize("syntax", ["tag", "hermes"])
def test_mask_marks_exactly_the_sampled_tokens(syntax):
    call = CALL if syntax == "tag" else hermes("12*7")
    rollouts, _engine, tokenizer = make_rollouts([call, ANSWER], task=make_task(syntax))
    t = roll(rollouts).trajectory
    assert len(t.token_ids) == len(t.action_mask) == len(t.logprobs) == len(t.versions)
    sampled = tokenizer.encode(call) + tokenizer.encode(ANSWER)
    assert t.token_ids[t.action_mask == 1].tolist() == sampled
    assert np.all(t.logprobs[t.action_mask == 1] == -0.5) and np.all(t.logprobs[t.action_mask == 0] == 0)
    assert np.all(t.versions[t.action_mask == 1] == 0) and np.all(t.versions[t.action_mask == 0] == -1)


def test_t1_sampled_ids_are_kept():
    """'he' + 'llo' stays two ids in the next prompt though the tokenizer would merge them."""
    rollouts, engine, tokenizer = make_rollouts([CALL, ANSWER])
    pieces = [tokenizer.encode(part)[0] for part in "hello"]
    assert len(tokenizer.encode("hello")) < len(pieces)
    turn = [*pieces, *tokenizer.encode(CALL)]
    rollouts, engine, _ = make_rollouts([turn, ANSWER])
    roll(rollouts)
    first, second = engine.requests[0][0], engine.requests[1][0]
    assert second[: len(first) + len(turn)] == first + turn


def test_t2_lengths_agree_when_decode_then_encode_would_shorten():
    _, _, tokenizer = make_rollouts([])
    pieces = [tokenizer.encode(part)[0] for part in "hello world"]
    assert len(tokenizer.encode(tokenizer.decode(pieces))) < len(pieces)
    rollouts, _engine, _ = make_rollouts([pieces])
    t = roll(rollouts).trajectory
    assert len(t.token_ids) == len(t.action_mask) == len(t.logprobs) == len(t.versions)
    assert t.action_mask.sum() == len(pieces)


def test_t3_sampled_stop_token_is_trained_and_the_header_is_not():
    rollouts, _engine, tokenizer = make_rollouts([hermes("12*7"), ANSWER], task=make_task("hermes"))
    t = roll(rollouts).trajectory
    end = t.turns[0].end
    assert tokenizer.decode(t.token_ids[end - 1 : end]) == "<|im_end|>"
    assert t.action_mask[end - 1] == 1 and t.logprobs[end - 1] == -0.5
    observation = tokenizer.decode(t.token_ids[end : t.turns[0].observation_end])
    assert observation.startswith("\n<|im_start|>tool\n") and observation.endswith("<|im_start|>assistant\n")
    assert not t.action_mask[end : t.turns[0].observation_end].any()


def test_t4_a_turn_cut_by_max_tokens_ends_truncated():
    rollouts, _engine, _tokenizer = make_rollouts([CALL], max_tokens_per_turn=4)
    t = roll(rollouts).trajectory
    assert t.stop_reason == StopReason.MAX_TOKENS
    assert t.turns[-1].finish_reason == "length"
    assert t.action_mask.sum() == 4 and t.action_mask[-1] == 1


def test_c2_a_stop_string_inside_thinking_does_not_end_the_turn():
    pieces = ["<think><calc>1+1</calc>", "?</think><calc>12*7</calc>", "<answer>84</answer><|im_end|>"]
    rollouts, engine, _ = make_rollouts(pieces)
    finished = roll(rollouts)
    assert finished.episode.turns == (
        "<think><calc>1+1</calc>?</think><calc>12*7</calc>",
        "<answer>84</answer>",
    )
    assert [result.text for turn in finished.episode.results for result in turn] == ["84"]
    assert len(engine.requests) == 3 and len({request for _, _, request in engine.requests}) == 3
    trajectory = finished.trajectory
    assert sum(trajectory.action_mask) == sum(turn.end - turn.start for turn in trajectory.turns)
    assert len(trajectory.turns) == 2 and finished.success


def test_c2_an_answer_in_thinking_that_the_prompt_opened_earns_nothing():
    task = make_task(prefill="<think>", rewards=[numeric_match])
    rollouts, *_ = make_rollouts(["so <answer>84</answer>, or not<|im_end|>"], task=task)
    assert roll(rollouts).trajectory.reward == 0.0
    rollouts, *_ = make_rollouts(["so</think><answer>84</answer><|im_end|>"], task=task)
    assert roll(rollouts).trajectory.reward == 1.0


def test_c2_a_turn_of_stop_strings_that_complete_nothing_ends_at_its_limit():
    rollouts, _, tokenizer = make_rollouts(lambda *_: tokenizer.encode("<think></calc>"))
    finished = roll(rollouts)
    assert finished.trajectory.stop_reason == "max_tokens"
    assert finished.trajectory.turns[0].end - finished.trajectory.turns[0].start == 200


def test_c5_a_call_cut_by_the_token_limit_does_not_run():
    ran = []

    @tool
    def calculator(expression: str) -> str:
        """Evaluate.

        Args:
            expression: What.
        """
        ran.append(expression)
        return "1"

    rollouts, *_ = make_rollouts([CALL], task=make_task(tools=[calculator]), max_tokens_per_turn=3)
    assert roll(rollouts).trajectory.stop_reason == StopReason.MAX_TOKENS
    assert ran == []


def test_c11_calls_for_ever_stop_at_the_turn_cap_and_the_last_is_not_executed():
    rollouts, engine, _ = make_rollouts([CALL] * 9, max_turns=3)
    t = roll(rollouts).trajectory
    assert t.stop_reason == StopReason.MAX_TURNS
    assert len(engine.requests) == 3
    assert [len(turn.calls) for turn in t.turns] == [1, 1, 0]


def long_tool(text: str):
    @tool(max_output_tokens=100_000)
    def calculator(expression: str) -> str:
        """Evaluate.

        Args:
            expression: What.
        """
        return text

    return calculator


def test_c12_an_observation_is_cut_to_fit_and_the_prompt_kept():
    task = make_task(tools=[long_tool("0123456789 " * 500)])
    rollouts, engine, tokenizer = make_rollouts([CALL, ANSWER], task=task, max_trajectory_tokens=300)
    t = roll(rollouts).trajectory
    assert t.stop_reason == StopReason.ANSWER
    assert len(t.token_ids) <= 300
    assert "characters left out" in tokenizer.decode(t.token_ids)
    assert engine.requests[1][0][: t.prompt_len] == engine.requests[0][0]


def test_c12_no_room_for_any_observation_ends_with_context_length():
    rollouts, _engine, tokenizer = make_rollouts([CALL])
    needed = len(rollouts.renderer.prompt(rollouts.task.make_messages(ROW))) + len(tokenizer.encode(CALL))
    rollouts, *_ = make_rollouts([CALL], max_trajectory_tokens=needed + 9)
    assert roll(rollouts).trajectory.stop_reason == StopReason.CONTEXT_LENGTH


def test_t7_tool_text_cannot_become_a_special_token():
    for syntax, call in (("tag", "<calc>evil</calc>"), ("hermes", hermes("evil"))):
        rollouts, _engine, tokenizer = make_rollouts([call, ANSWER], task=make_task(syntax))
        t = roll(rollouts).trajectory
        turn = t.turns[0]
        observation = t.token_ids[turn.end : turn.observation_end].tolist()
        assert "I am done" in tokenizer.decode(observation)
        specials = [i for i in observation if i in tokenizer.all_special_ids]
        opened = 0 if syntax == "tag" else 3  # tool header, its end, the assistant header
        assert len(specials) == opened, syntax


def test_m6_a_hung_rollout_ends_at_its_deadline_with_a_reason():
    async def never(*_):
        await asyncio.Event().wait()

    rollouts, engine, _ = make_rollouts([CALL], trajectory_timeout_s=0.05)
    engine.generate = never
    t = roll(rollouts).trajectory
    assert t.stop_reason == StopReason.DEADLINE
    assert t.reward is None and "trajectory_timeout_s" in t.error


def test_r3_a_reward_that_raises_leaves_the_trajectory_unscored():
    def broken(episode):
        raise RuntimeError("judge is down")

    from tasks.types import Reward

    rollouts, *_ = make_rollouts([ANSWER], task=make_task(rewards=[Reward("judge", broken)]))
    t = roll(rollouts).trajectory
    assert t.reward is None and "judge is down" in t.error


def test_r3_a_success_that_raises_leaves_the_trajectory_unscored_and_the_actor_alive():
    def success(episode):
        return episode.scores["no such reward"] == 1.0

    rollouts, *_ = make_rollouts([ANSWER], task=make_task(success=success))
    finished = roll(rollouts)
    assert finished.trajectory.reward is None and not finished.success
    assert finished.trajectory.error == "task.success: KeyError: 'no such reward'"


def test_success_is_asked_once_the_rewards_that_see_the_group_are_known():
    def ranking(group):
        return [1.0] * len(group)

    task = make_task(
        rewards=[Reward("ranking", ranking)], success=lambda episode: episode.scores["ranking"] == 1.0
    )
    rollouts, *_ = make_rollouts([ANSWER], task=task)
    alone = roll(rollouts)
    assert alone.trajectory.error is None and not alone.success
    (member,) = asyncio.run(score_members(task, [alone]))
    assert member.success and member.trajectory.metrics["success"] == 1.0
    (lost,) = asyncio.run(score_members(task, [roll(make_rollouts([ANSWER], task=task)[0])], whole=False))
    assert not lost.success and "an actor died" in lost.trajectory.error


def test_a_tool_whose_server_is_gone_leaves_the_trajectory_unscored():
    from toolcall.types import Outcome

    rollouts, *_ = make_rollouts([CALL, ANSWER])
    run = rollouts.executor.run

    async def gone(parsed, context):
        from dataclasses import replace

        return tuple(replace(r, outcome=Outcome.INFRASTRUCTURE) for r in await run(parsed, context))

    rollouts.executor.run = gone
    finished = roll(rollouts)
    assert finished.trajectory.reward is None and not finished.success
    assert finished.trajectory.error.startswith("tool calculator")


def test_an_episode_error_is_recorded_but_a_dead_engine_ends_the_actor():
    def boom(*_):
        raise ValueError("cannot go on")

    rollouts, *_ = make_rollouts(boom)
    t = roll(rollouts).trajectory
    assert t.stop_reason == StopReason.ERROR and t.error == "ValueError: cannot go on"

    def dies(*_):
        raise EngineDied("gone")

    rollouts, *_ = make_rollouts(dies)
    with pytest.raises(EngineDied):
        roll(rollouts)


def test_sampling_parameters_are_the_same_in_every_turn():
    from dataclasses import replace

    rollouts, engine, _ = make_rollouts([CALL, CALL, ANSWER])
    roll(rollouts)
    assert len({replace(sampling, max_tokens=0) for _, sampling, _ in engine.requests}) == 1


def test_versions_follow_a_weight_change_between_turns():
    rollouts, engine, tokenizer = make_rollouts([])
    turns = iter([(CALL, 3), (ANSWER, 4)])

    def script(*_):
        text, engine.version = next(turns)
        return tokenizer.encode(text)

    engine._script = script
    t = roll(rollouts).trajectory
    first, second = t.turns
    assert set(t.versions[first.start : first.end]) == {3}
    assert set(t.versions[second.start : second.end]) == {4}


def test_c9_clean_up_runs_once_even_after_an_exception():
    closed = []

    @tool
    def calculator(expression: str, context: ToolContext) -> str:
        """Evaluate.

        Args:
            expression: What.
        """
        context.resources.callback(closed.append, context.trajectory_id)
        raise ValueError("no")

    rollouts, *_ = make_rollouts([CALL, ANSWER], task=make_task(tools=[calculator]))
    t = roll(rollouts).trajectory
    assert t.stop_reason == StopReason.ANSWER and closed == ["group-1/0"]


def test_rewards_see_what_the_tools_hold_before_it_is_cleaned_up():
    @tool
    def calculator(expression: str, context: ToolContext) -> str:
        """Evaluate.

        Args:
            expression: What.
        """
        context.state["open"] = expression
        context.resources.callback(context.state.clear)
        return "84"

    left = Reward("left", lambda context: float(context.state["open"] == "12*7"))
    rollouts, *_ = make_rollouts([CALL, ANSWER], task=make_task(tools=[calculator], rewards=[left]))
    finished = roll(rollouts)
    assert finished.trajectory.reward == 1.0 and finished.episode.context.state == {}


def test_what_the_tools_may_say_in_all_turns_together_has_a_limit():
    task = make_task(tools=[long_tool("0123456789 " * 500)])
    limits = {
        "max_observation_tokens": 100,
        "max_total_observation_tokens": 150,
        "max_trajectory_tokens": 4000,
    }
    rollouts, *_ = make_rollouts([CALL, CALL, CALL, ANSWER], task=task, **limits)
    t = roll(rollouts).trajectory
    sizes = [turn.observation_end - turn.end for turn in t.turns]
    assert 90 <= sizes[0] <= 100 and sum(sizes) <= 150
    assert t.stop_reason == StopReason.CONTEXT_LENGTH and len(t.turns) < 4


def test_an_observation_is_cut_on_the_tools_side():
    for keep, ends in (("head", "first"), ("tail", "last")):
        tool_ = long_tool("first " + "0123456789 " * 500 + " last").with_options({"keep": keep})
        rollouts, _engine, tokenizer = make_rollouts([CALL, ANSWER], task=make_task(tools=[tool_]))
        t = roll(rollouts).trajectory
        observation = tokenizer.decode(t.token_ids[t.turns[0].end : t.turns[0].observation_end])
        assert ends in observation and {"first": "last", "last": "first"}[ends] not in observation


def test_a_call_that_the_deadline_cuts_off_leaves_its_span_on_the_trajectory():
    @tool
    async def calculator(expression: str) -> str:
        """Evaluate."""
        await asyncio.Event().wait()
        return ""

    rollouts, *_ = make_rollouts([CALL], task=make_task(tools=[calculator]), trajectory_timeout_s=0.05)
    t = roll(rollouts).trajectory
    assert t.stop_reason == StopReason.DEADLINE
    assert [(call["name"], call["outcome"]) for call in t.turns[0].calls] == [("calculator", "cancelled")]


def test_a_call_that_an_open_breaker_refused_leaves_the_trajectory_unscored():
    @tool(idempotent=True, breaker_threshold=1)
    async def calculator(expression: str) -> str:
        """Evaluate."""
        raise TimeoutError("slow")

    rollouts, *_ = make_rollouts([CALL, CALL, ANSWER], task=make_task(tools=[calculator]))
    t = roll(rollouts).trajectory
    assert [call["outcome"] for turn in t.turns for call in turn.calls] == ["timeout", "breaker_open"]
    assert (
        t.reward is None and t.error == "tool calculator: calculator is unavailable: its last 1 calls failed"
    )
