"""The parts of `benchmarks/buffer.py` that need neither peers nor minutes still run."""

from rich.console import Console

from benchmarks.buffer import UNIT, measure_memory


def test_the_memory_benchmark_trains_what_it_says():
    console = Console(record=True, width=120)
    measure_memory(4 * UNIT, console)
    text = console.export_text()
    assert f"{4 * UNIT:,}" in text and "ledger balanced: True, trained 256 groups" in text
