"""Episodes with a model behind an OpenAI-compatible endpoint."""

import asyncio
import json

import httpx2 as httpx
import pytest

from actors.endpoint import Endpoint, EndpointError
from actors.evaluator import Draw
from configs.schema import TaskConfig
from tests.unit.actors.support import make_task
from toolcall import Outcome, ToolUnavailable, tool

ROW = {"question": "12 times 7?", "answer": "84"}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "calculator", "arguments": '{"expression": "12*7"}'},
}


def message(content=None, calls=None, finish="stop"):
    said = {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "message": said, "finish_reason": finish}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 5, "total_tokens": 6},
    }


def roll(*answers, syntax="hermes", tools_in_prompt=False, url="http://test/v1", offered=None, **limits):
    """The finished episode and the requests that the server got."""
    asked, left = [], list(answers)

    def serve(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"object": "list", "data": [{"id": "first", "object": "model"}]})
        asked.append(json.loads(request.content))
        answer = left.pop(0)
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)

    async def scenario():
        task = make_task(syntax, tools_in_prompt=tools_in_prompt, offered=offered)
        http = httpx.AsyncClient(transport=httpx.MockTransport(serve))
        async with Endpoint(url, TaskConfig(**limits), task, http) as endpoint:
            draw = Draw("sampled", 0, ROW, 0.7, 3, 1)
            return await endpoint.roll(draw, draw.lease(), 0)

    return asyncio.run(scenario()), asked


def test_structured_calls_run_and_their_results_go_back_by_id():
    finished, asked = roll(message(calls=[CALL], finish="tool_calls"), message("<answer>84</answer>"))
    assert finished.success and finished.trajectory.reward == 1.0 and finished.episode.num_tokens == 10
    assert asked[0]["model"] == "first" and asked[0]["tools"][0]["function"]["name"] == "calculator"
    assert asked[1]["messages"][-1] == {"role": "tool", "tool_call_id": "c1", "content": "84"}
    assert '"12*7"' in finished.episode.turns[0]
    assert asked[0]["seed"] == asked[1]["seed"]


def test_calls_in_the_text_are_read_by_the_tasks_parser():
    finished, asked = roll(
        message("<calc>12*7"), message("<answer>84</answer>"), syntax="tag", tools_in_prompt=True
    )
    assert finished.success and finished.episode.results[0][0].text == "84"
    assert "tools" not in asked[0] and asked[0]["stop"] == ["</calc>"]
    assert asked[1]["messages"][-1]["role"] == "user" and "84" in asked[1]["messages"][-1]["content"]


def test_c5_a_message_cut_by_the_limit_ends_the_episode():
    finished, _ = roll(message("<calc>12*7", finish="length"), syntax="tag", tools_in_prompt=True)
    assert finished.trajectory.stop_reason == "max_tokens" and finished.trajectory.reward == 0.0


def test_c1_broken_arguments_are_answered_with_the_reason():
    broken = {**CALL, "function": {"name": "calculator", "arguments": '{"expression": '}}
    finished, asked = roll(message(calls=[broken]), message("<answer>84</answer>"))
    assert "no valid JSON" in asked[1]["messages"][-1]["content"] and finished.success


def test_c11_calls_for_ever_stop_at_the_turn_cap():
    finished, asked = roll(*[message(calls=[CALL])] * 3, max_turns=2)
    assert finished.trajectory.stop_reason == "max_turns" and len(asked) == 2


def test_r3_an_endpoint_that_refuses_is_an_error_of_the_episode_not_a_wrong_answer():
    finished, _ = roll(httpx.Response(400, json={"error": {"message": "too long"}}), url="http://test/v1#m")
    assert finished.trajectory.reward is None and not finished.success
    assert "BadRequestError" in finished.trajectory.error


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, text="<html>proxy</html>"),
        httpx.Response(200, json={**message("84"), "choices": []}),
        httpx.Response(200, json={**message("84"), "choices": None}),
    ],
)
def test_r3_an_answer_that_is_none_is_an_error_of_the_episode(answer):
    finished, _ = roll(answer)
    assert finished.trajectory.stop_reason == "error" and finished.trajectory.reward is None


def test_a_conversation_that_outgrows_the_model_ends_as_in_training():
    """Were it unscored, the longest conversations would be left out of the success."""
    too_long = {"error": {"message": "This model's maximum context length is 2048 tokens", "code": 400}}
    finished, _ = roll(httpx.Response(400, json=too_long))
    assert finished.trajectory.stop_reason == "context_length"
    assert finished.trajectory.error is None and finished.trajectory.reward == 0.0


def test_an_endpoint_that_is_not_there_is_said_in_one_sentence(monkeypatch):
    monkeypatch.setattr("actors.endpoint.RETRIES", 0)

    async def scenario():
        def refuse(request):
            raise httpx.ConnectError("refused")

        http = httpx.AsyncClient(transport=httpx.MockTransport(refuse))
        async with Endpoint("http://test/v1", TaskConfig(), make_task(), http):
            pass

    with pytest.raises(
        EndpointError, match=r"does not list its models .* name the model as http://test/v1#name"
    ):
        asyncio.run(scenario())


def test_r3_an_open_breaker_leaves_an_episode_unscored_as_in_training():
    @tool(breaker_threshold=1)
    def calculator(expression: str) -> str:
        """Calculate.

        Args:
            expression: What to calculate.
        """
        raise ToolUnavailable("nobody there")

    answers = [message(calls=[CALL], finish="tool_calls"), message("<answer>84</answer>")] * 2

    def serve(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=answers.pop(0))

    async def scenario():
        http = httpx.AsyncClient(transport=httpx.MockTransport(serve))
        task = make_task("hermes", tools=[calculator])
        async with Endpoint("http://test/v1#m", TaskConfig(), task, http) as endpoint:
            draw = Draw("sampled", 0, ROW, 0.7, 3, 2)
            return [await endpoint.roll(draw, draw.lease(), number) for number in (0, 1)]

    _, refused = asyncio.run(scenario())
    assert refused.episode.results[0][0].outcome is Outcome.BREAKER_OPEN
    assert refused.trajectory.reward is None and not refused.success


def test_samples_of_one_prompt_do_not_see_each_other_where_the_task_hands_out_the_rows_messages():
    asked = []

    def serve(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content)["messages"])
        return httpx.Response(200, json=message("<answer>84</answer>"))

    async def scenario():
        http = httpx.AsyncClient(transport=httpx.MockTransport(serve))
        task = make_task("hermes", make_messages=lambda row: row["messages"])
        row = {**ROW, "messages": [{"role": "user", "content": "12 times 7?"}]}
        async with Endpoint("http://test/v1#m", TaskConfig(), task, http) as endpoint:
            draw = Draw("sampled", 0, row, 0.7, 3, 2)
            return [await endpoint.roll(draw, draw.lease(), number) for number in (0, 1)]

    first, second = asyncio.run(scenario())
    assert asked[0] == asked[1] and first.episode.messages == second.episode.messages


def test_a_failed_call_is_told_as_in_training():
    wrong = {**CALL, "function": {"name": "calculater", "arguments": "{}"}}
    _, asked = roll(message(calls=[wrong], finish="tool_calls"), message("no"))
    assert asked[1]["messages"][-1]["content"].startswith("error: there is no tool 'calculater'")


def test_a_row_offers_its_own_tools_to_an_endpoint_too():
    @tool
    def weather(city: str) -> str:
        """Look out."""
        return f"rain in {city}"

    call = {
        "id": "c2",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Bergen"}'},
    }
    finished, asked = roll(
        message(calls=[CALL, call], finish="tool_calls"), message("wet"), offered=lambda row: [weather]
    )
    assert [each["function"]["name"] for each in asked[0]["tools"]] == ["weather"]
    unknown, known = finished.episode.results[0]
    assert unknown.outcome is Outcome.UNKNOWN_TOOL and (known.outcome, known.text) == ("ok", "rain in Bergen")
