"""my_task: a tool and a reward, to be changed. `python -m pytest my_task` says whether they fit together."""

from __future__ import annotations

from tasks import Episode, reward
from tasks.rules import extract_answer
from toolcall import tool

PRICES = {"lamp": 25, "desk": 90, "chair": 40, "rug": 35, "shelf": 60, "clock": 15, "vase": 12, "sofa": 300}


@tool(timeout=10, max_concurrency=32, idempotent=True)
async def price(item: str) -> str:
    """Look up what an item costs.

    Args:
        item: Its name, one word.
    """
    name = item.strip().lower()
    if name not in PRICES:
        raise ValueError(f"no item {name!r}; there are: {', '.join(PRICES)}")  # text for the model
    return str(PRICES[name])


@reward(weight=1.0)
async def right_price(trajectory: Episode, answer: str) -> float:
    """1 if the model's <answer> is the row's. Parameters besides the trajectory are fields of the row."""
    return float(extract_answer(trajectory) == answer)
