"""Rows of `sft.data` as token ids and action mask.

A row is a chat, `{"messages": [...], "tools": [...]}`, whose assistant turns are trained, or a trajectory as
`launch.py export-trajectories` writes it, `{"token_ids": [...], "action_mask": [...], "text": "..."}`, whose
ids are taken as they are.

Invariant: mask 1 exactly where the model would have sampled: an assistant turn with its end-of-turn token,
not the header before it nor what the template adds after it. Called by `actors.demonstrations` and the
launcher.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tasks.readers import BadData, PlacedRow


@dataclass(frozen=True)
class Rendered:
    token_ids: list[int]
    action_mask: list[int]


def check_rows(rows: Iterable[PlacedRow]) -> None:
    """Refuse a row of neither kind, before any model is loaded. Raises BadData naming its place."""
    for placed in rows:
        row = placed.row
        if "token_ids" in row:
            if len(row["token_ids"]) != len(row.get("action_mask", ())):
                raise BadData(f"{placed.place}: token_ids and action_mask must be equally long")
        elif not _has_reply(row.get("messages")):
            raise BadData(
                f"{placed.place} is no demonstration: give it messages with at least one of role "
                '"assistant", or token_ids and action_mask as export-trajectories writes them'
            )


def _has_reply(messages: Any) -> bool:
    return isinstance(messages, list) and any(
        isinstance(message, dict) and message.get("role") == "assistant" for message in messages
    )


def render(placed: PlacedRow, tokenizer: Any, longest: int) -> Rendered:
    """A row as token ids and mask. Raises BadData naming its place."""
    row = placed.row
    if "token_ids" in row:
        rendered = Rendered(list(row["token_ids"]), list(row["action_mask"]))
        if "text" in row and tokenizer.decode(rendered.token_ids) != row["text"]:
            raise BadData(
                f"{placed.place} was written with another tokenizer: its ids do not decode to its text; "
                "export the trajectories of a run of this model"
            )
    else:
        rendered = _render_chat(placed, tokenizer)
    if not any(rendered.action_mask) or rendered.action_mask[0]:
        raise BadData(f"{placed.place} has nothing to train after a prompt")
    if len(rendered.token_ids) > longest:
        raise BadData(
            f"{placed.place} has {len(rendered.token_ids)} tokens, more than task.max_trajectory_tokens = "
            f"{longest}; raise it or leave the row out"
        )
    return rendered


def _render_chat(placed: PlacedRow, tokenizer: Any) -> Rendered:
    messages, tools = placed.row["messages"], placed.row.get("tools")

    def template(count: int, *, opens_reply: bool) -> str:
        return tokenizer.apply_chat_template(
            messages[:count], tools=tools, add_generation_prompt=opens_reply, tokenize=False
        )

    ids: list[int] = []
    mask: list[int] = []
    done = ""  # the text that `ids` stand for
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before, after = template(index, opens_reply=True), template(index + 1, opens_reply=False)
        if not before.startswith(done) or not after.startswith(before):
            raise BadData(
                f"{placed.place}: the model's chat template writes earlier turns anew after message {index}, "
                "so no tokens can be told to be the model's; split the chat so that each row ends with its "
                "only trained turn"
            )
        reply = after[len(before) :]
        end = reply.find(tokenizer.eos_token) if tokenizer.eos_token else -1
        if end >= 0:  # what the template adds after the end of the turn is not sampled
            reply = reply[: end + len(tokenizer.eos_token)]
        for text, sampled in ((before[len(done) :], 0), (reply, 1)):
            piece = tokenizer.encode(text, add_special_tokens=False)
            ids += piece
            mask += [sampled] * len(piece)
        done = before + reply
    return Rendered(ids, mask)
