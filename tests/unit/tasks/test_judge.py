"""The model judge: marks, rankings, what a judge that fails leads to, cache, slots, tokens."""

from __future__ import annotations

import asyncio
import json

import httpx2 as httpx
import pytest
from openai import AsyncOpenAI

from metrics import names
from tasks import judge as module
from tasks import score
from tasks.calibration import calibrate, report
from tasks.judge import judge, ranking
from tasks.readers import BadData, PlacedRow
from tasks.reward import BadReward, configured
from tasks.scoring import score_group
from tasks.usage import usage
from tests.unit.actors.support import make_task
from tests.unit.tasks.support import episode, result

URL = "http://judge/v1"


@pytest.fixture
def server(monkeypatch):
    """A judge that replies with what is in `left`, the last for ever; `asked` is what it got."""

    class Server:
        def __init__(self) -> None:
            self.asked: list[dict] = []
            self.left: list[str | httpx.Response] = []
            self.running = self.most = 0

        async def serve(self, request: httpx.Request) -> httpx.Response:
            if request.url.path.endswith("/models"):
                return httpx.Response(200, json={"object": "list", "data": [{"id": "j", "object": "model"}]})
            self.asked.append(json.loads(request.content))
            self.running += 1
            self.most = max(self.most, self.running)
            for _ in range(50):  # turns for the requests that may run beside this one
                await asyncio.sleep(0)
            self.running -= 1
            reply = self.left.pop(0) if len(self.left) > 1 else self.left[0]
            if isinstance(reply, httpx.Response):
                return reply
            choice = {"index": 0, "message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}
            body = {"id": "x", "object": "chat.completion", "created": 0, "model": "j", "choices": [choice]}
            tokens = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
            return httpx.Response(200, json=body | {"usage": tokens})

    served = Server()

    def client(endpoint: str) -> AsyncOpenAI:
        http = httpx.AsyncClient(transport=httpx.MockTransport(served.serve))
        return AsyncOpenAI(base_url=endpoint, api_key="k", http_client=http)

    monkeypatch.setattr(module, "_client", client)
    usage.take()
    return served


def scored(reward, *episodes, **options):
    made = configured(reward, {"options": {"endpoint": URL, **options}})

    async def scenario():
        scores = await asyncio.gather(*(score([made], each) for each in episodes))
        return await score_group([made], episodes, scores) if made.sees_group else scores

    return asyncio.run(scenario())


def test_marks_are_weighted_and_brought_to_0_to_1(server):
    server.left = ['{"correct": 5, "short": 1}']
    (only,) = scored(judge, episode("<think>hm</think>84"), criteria={"correct": 3, "short": 1})
    assert only.reward == pytest.approx(0.75)
    sent = server.asked[0]
    assert "hm" not in sent["messages"][0]["content"] and "84" in sent["messages"][0]["content"]
    schema = sent["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["correct", "short"] and schema["properties"]["short"]["maximum"] == 5


def test_r4_the_judge_does_not_see_tool_text_unless_it_is_asked_for(server):
    server.left = ['{"quality": 3}']
    told = episode(("<calc>12*7</calc>", result("SECRET")), "I am done.")
    scored(judge, told)
    scored(judge, told, template="{transcript}")
    assert ["SECRET" in sent["messages"][0]["content"] for sent in server.asked] == [False, True]


def test_literal_braces_in_template_row_and_answer_are_safe(server):
    server.left = ['{"quality": 3}']
    made = episode("{answer} {response}", question="{nothing}")
    scored(judge, made, template='{question}|{response}|{{response}}|{"a": 1}|{}')
    assert server.asked[0]["messages"][0]["content"] == '{nothing}|{answer} {response}|{response}|{"a": 1}|{}'


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ("I like it", "gave no JSON object: 'I like it'"),
        ("[1]", "gave no JSON object"),
        ('{"quality": 9}', "quality = 9 is no mark from 1 to 5"),
        ('{"quality": "high"}', "quality = 'high' is no mark"),
        ("{}", "quality = None is no mark"),
        (httpx.Response(400, json={"error": {"message": "too long"}}), "BadRequestError"),
        (httpx.Response(401, json={"error": {"message": "no key"}}), "AuthenticationError"),
    ],
)
def test_r3_a_judge_without_a_verdict_leaves_the_trajectory_unscored(server, reply, says):
    server.left = [reply]
    (only,) = scored(judge, episode("84"), retries=0)
    assert only.reward is None and says in only.error
    assert usage.take().get(names.JUDGE_FAILURES, 0) + ("no mark" in only.error) == 1


@pytest.mark.parametrize(
    "reply",
    [
        'It claims {"quality": 5} of itself. My marks: {"quality": 2}',
        '<think>perhaps {"quality": 5}</think>\n```json\n{"quality": 2}\n```',
        '{"quality": 5}?</think>{"quality": 2}',
    ],
)
def test_a_verdict_that_the_judge_quotes_or_thinks_of_is_not_its_own(server, reply):
    server.left = [reply]
    (only,) = scored(judge, episode("good"))
    assert only.reward == 0.25


def test_r3_a_template_that_names_what_is_not_there_says_what_is(server):
    (only,) = scored(judge, episode("84"), template="{respnse}")
    assert only.reward is None and "names {respnse}; there is: question, answer, prompt" in only.error


def test_a_server_without_structured_output_is_asked_without_from_then_on(server):
    refusal = httpx.Response(400, json={"error": {"message": "response_format is not supported"}})
    server.left = [refusal, 'Sure! {"quality": 5}', '{"quality": 1}']

    async def scenario():
        made = configured(judge, {"options": {"endpoint": URL, "retries": 0}})
        return [(await score([made], episode(text))).reward for text in ("a", "b")]

    assert asyncio.run(scenario()) == [1.0, 0.0]
    assert ["response_format" in sent for sent in server.asked] == [True, False, False]


def test_equal_requests_are_asked_once_and_a_failure_is_not_kept(server):
    server.left = ["nothing", '{"quality": 5}']

    async def scenario():
        made = configured(judge, {"options": {"endpoint": URL}})
        first = await asyncio.gather(*(score([made], episode("84")) for _ in range(3)))
        second = await asyncio.gather(*(score([made], episode("84")) for _ in range(3)))
        return first, second

    first, second = asyncio.run(scenario())
    assert [s.reward for s in (*first, *second)] == [None] * 3 + [1.0] * 3
    assert len(server.asked) == 2
    used = usage.take()
    assert used[names.JUDGE_CALLS] == 2 and used[names.JUDGE_CACHED] == 4


def test_no_more_requests_at_once_than_slots(server):
    server.left = ['{"quality": 5}']
    scored(judge, *(episode(str(n)) for n in range(9)), concurrency=2)
    assert server.most == 2 and len(server.asked) == 9


def test_tokens_and_their_price_are_counted(server):
    server.left = ['{"quality": 5}']
    scored(judge, episode("a"), episode("b"), price=[2.0, 10.0])
    used = usage.take()
    assert (used[names.JUDGE_TOKENS_IN], used[names.JUDGE_TOKENS_OUT]) == (200, 20)
    assert used[names.JUDGE_COST] == pytest.approx((200 * 2 + 20 * 10) / 1e6)


def test_a_ranking_is_one_request_and_equal_answers_share_their_value(server):
    server.left = ['{"order": [2, 1, 3]}']
    scores = scored(ranking, episode("b"), episode("a"), episode("c"), episode("b"))
    assert [s.reward for s in scores] == [0.5, 1.0, 0.0, 0.5] and len(server.asked) == 1
    alone = scored(ranking, episode("b"), episode("b"))
    assert [s.reward for s in alone] == [0.5, 0.5] and len(server.asked) == 1


@pytest.mark.parametrize("order", ["[1, 1]", "[1]", "[1, 3]", '"1, 2"', "null"])
def test_r3_a_ranking_that_is_no_order_leaves_the_group_unscored(server, order):
    server.left = [f'{{"order": {order}}}']
    scores = scored(ranking, episode("a"), episode("b"))
    assert all(s.reward is None and "does not name each of the 2 answers once" in s.error for s in scores)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"criteria": {}}, "options.criteria = {}"),
        ({"criteria": {"x": -1}}, "options.criteria"),
        ({"scale": [5, 1]}, "the first must be below the second"),
        ({"endpont": "x"}, "options has no 'endpont'"),
    ],
)
def test_options_that_make_no_judge_are_refused(options, says):
    with pytest.raises(BadReward, match=says):
        configured(judge, {"options": options})


# --- calibration ---------------------------------------------------------------------------------------


def test_calibration_reports_agreement_and_what_failed(server):
    server.left = ['{"quality": 5}', '{"quality": 1}', "nothing"]
    rows = [
        PlacedRow({"question": q, "response": q, "score": s}, q) for q, s in (("a", 1), ("b", 0), ("c", 1))
    ]
    made = configured(judge, {"options": {"endpoint": URL, "concurrency": 1}})
    found = calibrate(make_task(), made, rows)
    assert (found.scored, found.agreement, found.kappa, found.pearson) == (2, 1.0, 1.0, pytest.approx(1.0))
    assert sum(found.unscored.values()) == 1 and found.used[names.JUDGE_CALLS] == 3


def test_a_judge_that_is_only_recorded_can_be_calibrated(server):
    server.left = ['{"quality": 5}', "nothing"]
    rows = [PlacedRow({"question": q, "response": q, "score": 1}, q) for q in "ab"]
    made = configured(judge, {"weight": 0, "options": {"endpoint": URL, "concurrency": 1}})
    found = calibrate(make_task(), made, rows)
    assert found.scored == 1 and ["no JSON" in reason for reason in found.unscored] == [True]


def test_agreement_beyond_chance_and_rank_correlation():
    """A judge that always says yes agrees with a yes-prone crowd, by chance alone."""
    yes = report([1.0] * 10, [1.0] * 8 + [0.0] * 2, {}, {})
    assert (yes.agreement, yes.kappa, yes.pearson) == (0.8, 0.0, None)
    bent = report([0.1, 0.2, 0.4, 0.9], [0.1, 0.5, 0.6, 0.7], {}, {})
    assert bent.spearman == pytest.approx(1.0) and bent.pearson < 0.99


def test_rows_that_cannot_calibrate_are_refused():
    for row, says in (
        ({"response": "x"}, "line 1: no 'score'"),
        ({"response": "x", "score": 7}, "score = 7"),
    ):
        with pytest.raises(BadData, match=says):
            calibrate(make_task(), judge, [PlacedRow(row, "line 1")])


def test_the_served_judge_is_asked_where_the_launcher_says_with_its_key(monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_JUDGE_ENDPOINT", "http://127.0.0.1:1/v1")
    monkeypatch.setenv("SLIPSTREAM_JUDGE_KEY", "own")
    client = module._client("served")
    assert (str(client.base_url), client.api_key) == ("http://127.0.0.1:1/v1/", "own")


def test_r3_a_served_judge_without_a_server_leaves_the_trajectory_unscored(monkeypatch):
    monkeypatch.delenv("SLIPSTREAM_JUDGE_ENDPOINT", raising=False)
    (reward,) = [configured(judge, {"use": "tasks.judge:judge", "options": {"endpoint": "served"}})]
    scored = asyncio.run(score([reward], episode(["84"])))
    assert scored.reward is None and "needs judge.serve" in scored.error
