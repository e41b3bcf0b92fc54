import json

import pytest
import torch
from safetensors.torch import save_file

from weightsync.adapters import base_names, merged


@pytest.fixture
def base(tmp_path):
    """A model in two files."""
    weights = {"one.weight": torch.ones(3, 2), "two.weight": torch.ones(2, 2), "norm.weight": torch.ones(2)}
    places = {"one.weight": "model-1.safetensors", "two.weight": "model-2.safetensors"}
    places["norm.weight"] = "model-2.safetensors"
    for file in set(places.values()):
        save_file({name: weights[name] for name in weights if places[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return tmp_path


def test_the_engine_gets_the_whole_model_with_the_adapters_added(base):
    low, high = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0], [0.0], [-1.0]])
    sent = [("one.weight.lora_A", low), ("one.weight.lora_B", high)]
    for _ in range(2):  # on top of the base each time
        whole = dict(merged(sent, base, torch.bfloat16))
        assert whole.keys() == base_names(base)
        assert whole["one.weight"].tolist() == [[2, 3], [1, 1], [0, -1]]
        assert whole["two.weight"].tolist() == [[1, 1], [1, 1]]
        assert {tensor.dtype for tensor in whole.values()} == {torch.bfloat16}


def test_an_adapter_of_an_unknown_weight_is_named(base):
    sent = [("three.weight.lora_A", torch.ones(1, 2)), ("three.weight.lora_B", torch.ones(2, 1))]
    with pytest.raises(RuntimeError, match=r"no weight for the adapter three\.weight\.lora_A"):
        merged(sent, base, torch.float32)


def test_a_folder_without_safetensors_has_no_base(tmp_path):
    assert base_names(tmp_path) == set()
