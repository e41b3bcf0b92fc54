"""Samples files: resumable, belonging to one evaluation, comparable."""

from dataclasses import replace

import pytest

from actors.samples import BadSamples, Sample, SampleFile, difference, read_samples, summarise

FACTS = {"task": "sums", "model": "a"}


def sample(prompt=0, number=0, success=True, decoding="sampled", seed=0, **fields) -> Sample:
    reward = {"reward": float(success)} if "error" not in fields else {"reward": None}
    return Sample(
        "sums",
        decoding,
        prompt,
        f"p{prompt}",
        seed,
        number,
        success,
        stop_reason="answer",
        **(reward | fields),
    )


def test_a_file_gives_back_what_was_written_and_goes_on(tmp_path):
    path = tmp_path / "deep" / "x.jsonl"
    first = SampleFile(path, FACTS)
    first.add(sample(0, turns=["é\u2028"]))
    first.close()
    with path.open("a") as file:
        file.write('{"decoding": "samp')  # a killed evaluation
    again = SampleFile(path, FACTS)
    assert list(again.done) == [("sums", "sampled", 0, 0, 0)]
    again.add(sample(1))
    again.close()
    assert read_samples(path) == [sample(0, turns=["é\u2028"]), sample(1)]


def test_a_sample_drawn_again_replaces_the_first(tmp_path):
    """As those of a group are, when a stopped evaluation lacked some of its members."""
    file = SampleFile(tmp_path / "x.jsonl", FACTS)
    for success in (False, True):
        file.add(sample(0, success=success))
    file.close()
    assert [one.success for one in read_samples(tmp_path / "x.jsonl")] == [True]


def test_a_file_of_another_evaluation_is_refused(tmp_path):
    SampleFile(tmp_path / "x.jsonl", FACTS).close()
    with pytest.raises(BadSamples, match="its model was 'a', now it is 'b'; give another --out"):
        SampleFile(tmp_path / "x.jsonl", FACTS | {"model": "b"})


@pytest.mark.parametrize("content", ["[1]\n", "{}\n", "{\n", '{"row": 1}\n', ""])
def test_what_is_no_samples_file_is_refused(tmp_path, content):
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(BadSamples):
        read_samples(tmp_path / "x.jsonl")
    with pytest.raises(BadSamples, match="no samples file"):
        read_samples(tmp_path / "y.jsonl")


def test_success_is_a_mean_over_prompts_and_errors_are_not_failures():
    down = sample(2, success=False, error="tool search: gone")
    found = summarise([sample(0, 0), sample(0, 1, success=False), sample(1, 0), sample(1, 1), down])
    assert (found["success"], found["n"], found["samples"], found["unscored"]) == (0.75, 2, 5, 1)
    assert found["pass_at_k"][1]["mean"] == 0.75 and found["pass_at_k"][2]["mean"] == 1.0
    assert found["reward"]["mean"] == 0.75
    assert found["stop_reasons"] == {"answer": {"count": 5, "success": 0.75}}
    assert found["errors"] == {"tool search: gone": 1}


def test_rows_with_one_prompt_are_as_many_prompts():
    """As where the files that a trajectory works on, and not the question, tell rows apart."""
    rows = [replace(sample(i, success=i < 3), prompt="same") for i in range(4)]
    found = summarise([*rows, sample(9, success=False)])
    assert (found["n"], found["success"]) == (5, 0.6) and list(found["pass_at_k"]) == [1]
    before = [replace(sample(i, success=i == 3), prompt="same") for i in range(4)]
    lost = [replace(row, error="gone") if row.prompt_index == 0 else row for row in rows]
    assert difference(lost, before)["sampled"]["success"]["mean"] == pytest.approx(1 / 3)
    assert difference(lost, before)["sampled"]["success"]["n"] == 3


def test_seeds_and_components_are_told_apart():
    parts = {"components": {"short": 0.5}}
    found = summarise([sample(0, seed=0, **parts), sample(0, seed=1, success=False, **parts)])
    assert found["seeds"] == {0: 1.0, 1: 0.0} and found["components"]["short"]["mean"] == 0.5
    assert set(found["pass_at_k"]) == {1, 2}


def test_two_evaluations_are_compared_prompt_by_prompt():
    """Unpaired, the two means would differ by much less than their intervals; paired, the gain is certain."""
    before = [sample(i, success=i < 10, reward=0.0) for i in range(20)]
    after = [sample(i, success=i < 12, reward=0.5) for i in range(1, 21)]
    found = difference(after, before)["sampled"]
    assert found["success"]["n"] == 19 and found["success"]["mean"] == pytest.approx(2 / 19)
    assert found["success"]["low"] >= 0.0
    assert found["reward"] == {"mean": 0.5, "low": 0.5, "high": 0.5, "n": 19}
    with pytest.raises(BadSamples, match="no prompt and decoding in common"):
        difference(after, [sample(99)])
