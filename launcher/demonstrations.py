"""Supervised runs and the demonstrations for them: what `launch.py sft` and `export-trajectories` add.

Called by `launcher.commands`.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from actors.preview import load_tokenizer
from buffer.messages import Trajectory
from buffer.reader import read_trajectories
from configs.load import load_config
from configs.run_folder import RunFolder
from launcher.preflight import PreflightError, prepare_model

# Demonstrations come alone, not in groups to compare, and none is ever too old.
SFT_SETTINGS = {
    "learner.policy_loss": "sft",
    "actors.group_size": "1",
    "buffer.min_group_survivors": "1",
    "buffer.drop_zero_variance": "false",
    "buffer.curriculum_max_rest": "0",
    "buffer.max_staleness": "8",
    "launch.gpus_per_actor": "0",
    "eval.every_steps": "0",
}


def sft_overrides(data: Path) -> list[str]:
    """The command line that makes a supervised run of a recipe."""
    settings = SFT_SETTINGS | {"sft.data": str(data.resolve())}
    return [word for key, value in settings.items() for word in (f"--{key}", value)]


def export_trajectories(
    folder: RunFolder, out: Path, min_reward: float, per_prompt: int | None, limit: int | None
) -> int:
    """Write a run's best trajectories as rows for `launch.py sft`, best first; how many.

    Raises PreflightError.
    """
    model_path = prepare_model(load_config(folder.config).config.model.path)
    tokenizer = load_tokenizer(model_path)
    taken: Counter[int] = Counter()
    count = 0
    with out.open("w", encoding="utf-8") as file:
        for trajectory in read_trajectories(existing_store(folder), min_reward):
            if per_prompt is not None and taken[trajectory.prompt_index] >= per_prompt:
                continue
            if limit is not None and count >= limit:
                break
            taken[trajectory.prompt_index] += 1
            file.write(json.dumps(row_of(trajectory, tokenizer), ensure_ascii=False) + "\n")
            count += 1
    if not count:
        raise PreflightError(
            f"{folder.store} holds no trajectory with a reward of {min_reward:g} or more, or they were "
            'trained and pruned (a run with buffer.keep = "all" keeps them)'
        )
    return count


def existing_store(folder: RunFolder) -> Path:
    if not folder.store.exists():
        raise PreflightError(f"{folder.root} has no buffer yet; start its run first")
    return folder.store


def row_of(trajectory: Trajectory, tokenizer: Any) -> dict[str, Any]:
    """A trajectory as a row that `tasks.demonstrations.render` takes back to the same ids and mask."""
    ids = trajectory.token_ids.tolist()
    return {
        "text": tokenizer.decode(ids),
        "token_ids": ids,
        "action_mask": trajectory.action_mask.tolist(),
        "reward": trajectory.reward,
        "task": trajectory.task,
        "prompt_index": trajectory.prompt_index,
        "trajectory_id": trajectory.trajectory_id,
    }
