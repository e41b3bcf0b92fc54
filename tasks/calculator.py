"""The shipped task: word problems solved with a calculator, small enough for a 135M model on a CPU.

Call syntaxes. `tag`: the call and its result stand inside one assistant turn,

    <calc>12*7</calc>
    <result>84</result>
    <answer>84</answer>

`hermes`: JSON calls and tool messages; `auto`: whatever the model's chat template writes. Worked examples
are prior turns of the conversation; as text in the system message they taught this model nothing. Success
of the untrained 135M model at T=0.7 on held-out problems: tag 27 % (n=256), hermes 18 % (n=128).
Called by `tasks.loading`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from tasks.rules import made_calls, numeric_match
from tasks.shipped import check_choice, check_range, prompt_maker, worked_example
from tasks.types import Episode, Message, Reward, Task
from tasks.word_problems import WordProblems
from toolcall.parsers import make_parser
from toolcall.tools.calculator import calculator
from toolcall.types import Outcome, ParseFailure, Parser, ToolCall

HELD_OUT_SEED = 0  # held-out problems are the same for every seed, so that runs compare
SYSTEM = {
    "tag": "Use <calc></calc> to calculate.",
    "hermes": "Use the calculator tool.",
    "auto": "Use the calculator tool.",
}
_OPERATOR = re.compile(r"[\d)%]\s*[-+*/^×÷−]")


@dataclass(frozen=True)
class Shot:
    question: str
    expression: str
    answer: str


SHOTS = (
    Shot(
        "Sam buys 3 hats for 15 dollars each and 4 caps for 8 dollars each. How much in all?",
        "3*15+4*8",
        "77",
    ),
    Shot("What is 6 times 14 plus 9?", "6*14+9", "93"),
    Shot("Mia had 95 eggs and gave 38 to Sam. How many eggs are left?", "95-38", "57"),
    Shot("Tom has 25 eggs and buys 17 more. How many eggs does Tom have now?", "25+17", "42"),
)


def calculator_task(
    seed: int,
    syntax: Literal["tag", "hermes", "auto"] = "tag",
    shots: int = len(SHOTS),
    train_size: int = 20_000,
    held_out_size: int = 1_000,
) -> Task:
    """Problems of one to three operations with integer answers.

    Success: the answer is right and a call that computes something succeeded. Rewards: `correct` 1,
    `well_formed_call` (such a call was made) 0.1, `no_wasted_calls` (none failed, was repeated or computed
    nothing) 0.1. So no wrong episode earns above 0.2, no right one below 1, and the best is right with the
    tool and no more calls than needed: 1.2. None is negative, as `adv_estimator = "maxrl"` wants it.
    """
    check_choice("syntax", syntax, SYSTEM)
    check_range("shots", shots, 0, len(SHOTS))
    check_range("train_size", train_size, 1)
    check_range("held_out_size", held_out_size, 1)
    parser = _parser(syntax)
    return Task(
        name="calculator",
        train=WordProblems(train_size, seed, held_out=False),
        held_out=WordProblems(held_out_size, HELD_OUT_SEED, held_out=True),
        make_messages=prompt_maker(SYSTEM[syntax], map(_example, SHOTS[:shots])),
        tools=(calculator,),
        parser=parser,
        rewards=(
            Reward("correct", numeric_match.fn, 1.0),
            Reward("well_formed_call", lambda episode: float(_computed(episode, parser)), 0.1),
            Reward("no_wasted_calls", lambda episode: float(not _wasted(episode, parser)), 0.1),
        ),
        success=lambda episode: _succeeded(episode, parser),
        tools_in_prompt=syntax != "auto",
    )


def _parser(syntax: str) -> Parser | None:
    if syntax == "auto":
        return None
    if syntax == "tag":
        return make_parser("tag", tags={"calc": (calculator.name, "expression")})
    return make_parser(syntax)


def _example(shot: Shot) -> list[Message]:
    arguments = {"expression": shot.expression}
    return worked_example(shot.question, calculator.name, arguments, shot.answer, shot.answer)


def _succeeded(episode: Episode, parser: Parser | None) -> bool:
    return bool(numeric_match(episode, episode.row["answer"])) and _computed(episode, parser)


def _computed(episode: Episode, parser: Parser | None) -> bool:
    """Did a call succeed that computes something, rather than only repeating a number?"""
    return any(
        result.outcome is Outcome.OK and _computes(call) for call, result in made_calls(episode, parser)
    )


def _wasted(episode: Episode, parser: Parser | None) -> bool:
    """Did a call fail, compute nothing, or repeat an earlier one?"""
    seen: list[Any] = []
    for call, result in made_calls(episode, parser):
        if result.outcome is not Outcome.OK or not _computes(call) or call.arguments in seen:
            return True
        seen.append(call.arguments)
    return False


def _computes(call: ToolCall | ParseFailure) -> TypeGuard[ToolCall]:
    return isinstance(call, ToolCall) and _OPERATOR.search(str(call.arguments.get("expression"))) is not None
