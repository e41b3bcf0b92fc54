import socket

import pytest

from tests.tiny import tiny_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "untied", tie_embeddings=False)


@pytest.fixture(scope="session")
def process_group():
    """A gloo group of one, as a single learner has."""
    import torch.distributed as dist

    from learner.deepspeed_engine import join_group

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    join_group(0, 1, f"127.0.0.1:{port}", "cpu", timeout_s=60)
    yield
    dist.destroy_process_group()
