import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from minite_jax.tasks import TASKS, ByteTokenizer, DigitSum, Example

_SPLITS = ("sft", "rl", "heldout")


@pytest.fixture(scope="module")
def task():
    return DigitSum(num_digits=3, working_share=0.25)


def _prompts(task, split):
    return [task.example(split, i).prompt for i in range(task.size(split))]


def test_splits_are_disjoint_and_complete(task):
    prompts = {split: _prompts(task, split) for split in _SPLITS}
    assert [len(prompts[split]) for split in _SPLITS] == [400, 400, 200]
    everything = sum(prompts.values(), [])
    assert sorted(everything) == [f"{number:03d}?" for number in range(1000)]


def test_answers_and_demonstrations(task):
    shares = []
    for split in _SPLITS:
        for i in range(0, task.size(split), 7):
            example = task.example(split, i)
            digits = [int(c) for c in example.prompt[:-1]]
            sums = [sum(digits[: n + 1]) % 10 for n in range(3)]
            assert example.answer == str(sums[-1])
            working = "".join(map(str, sums))
            assert example.demonstration in (f"={example.answer}.", f"{working}={example.answer}.")
            assert task.reward(example, task.encode(example.demonstration)) == 1.0
            shares.append(example.demonstration.startswith(working))
            assert len(task.encode(example.prompt)) <= task.max_prompt_tokens
            assert len(task.encode(example.demonstration)) <= task.max_completion_tokens
    assert 0.15 < sum(shares) / len(shares) < 0.35


@pytest.mark.parametrize(
    "completion, reward",
    [
        ("=2.", 1), ("28272=2.", 1), ("99999=2.", 1),  # the working is not judged
        ("=3.", 0), ("=2", 0), ("2.", 0), ("", 0), (".", 0), ("=.", 0), ("=12.", 0), ("=2..", 0), ("=2.=2.", 0), ("==2.", 0),
        ("=2 .", 0), ("= 2.", 0), ("=2.x", 0),
    ],
)  # fmt: skip
def test_rewards_by_hand(completion, reward):
    task = DigitSum()
    example = Example("26455?", "=2.", "2")  # 2 + 6 + 4 + 5 + 5 = 22
    assert task.reward(example, task.encode(completion)) == reward


def test_a_completion_that_is_no_text_gets_nothing(task):
    assert task.reward(task.example("rl", 0), [0xFF, 0xFE, 0x2E]) == 0.0


def test_traits(task):
    assert task.traits(task.encode("123=3.")) == {"working": 1.0}
    assert task.traits(task.encode("=3.")) == task.traits(task.encode("33.")) == {"working": 0.0}


def test_the_same_in_another_object_and_another_process(task):
    other = DigitSum(num_digits=3, working_share=0.25)
    some = [task.example("rl", i) for i in range(20)]
    assert some == [other.example("rl", i) for i in range(20)]
    # Known values: which prompt is where belongs to the task, and a change would leak held-out prompts into training.
    code = "from minite_jax.tasks import DigitSum; t = DigitSum(3); print([t.example('heldout', i).prompt for i in range(8)])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    assert printed.strip() == str([task.example("heldout", i).prompt for i in range(8)])


def test_the_working_share_does_not_move_prompts_between_splits(task):
    none, all_ = DigitSum(3, working_share=0.0), DigitSum(3, working_share=1.0)
    assert _prompts(none, "sft") == _prompts(all_, "sft") == _prompts(task, "sft")
    assert all(none.example("sft", i).demonstration[0] == "=" for i in range(50))
    assert all(all_.example("sft", i).demonstration[3] == "=" for i in range(50))


def test_shots_are_solved_problems_of_the_supervised_split():
    plain, task = DigitSum(3), DigitSum(3, max_shots=4)
    known = {e.prompt + e.demonstration for e in (plain.example("sft", i) for i in range(400))}
    counts, lengths = set(), []
    for split in _SPLITS:
        for i in range(0, plain.size(split), 5):
            example, bare = task.example(split, i), plain.example(split, i)
            assert example == task.example(split, i) and example.prompt.endswith(bare.prompt)
            assert (example.demonstration, example.answer) == (bare.demonstration, bare.answer)
            shots = [shot + "." for shot in example.prompt[: -len(bare.prompt)].split(".")[:-1]]
            assert set(shots) <= known and not any(shot.startswith(bare.prompt) for shot in shots)
            counts.add(len(shots))
            lengths.append(len(task.encode(example.prompt)))
    assert counts == set(range(5)) and max(lengths) <= task.max_prompt_tokens < max(lengths) + 12


def test_errors(task):
    with pytest.raises(ValueError, match="num_digits=7 must lie between 2 and 6"):
        DigitSum(7)
    with pytest.raises(ValueError, match="working_share=2"):
        DigitSum(3, working_share=2.0)
    with pytest.raises(ValueError, match="max_shots=-1 must be 0 or more"):
        DigitSum(3, max_shots=-1)
    with pytest.raises(ValueError, match="no split 'test'; there are sft, rl, heldout"):
        task.size("test")
    for index in (-1, 200):
        with pytest.raises(IndexError, match="outside split 'heldout' of 200 problems"):
            task.example("heldout", index)


def test_registry_and_stop_token(task):
    assert TASKS["digit_sum"] is DigitSum
    assert task.stop_ids == (ord("."),)
    assert task.vocab_size == 256


def test_tokenizer():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("a=é") == [97, 61, 0xC3, 0xA9]
    assert tokenizer.decode(tokenizer.encode("a=é")) == "a=é"
    assert tokenizer.decode([97, 0xFF]) == "a\ufffd"
    assert tokenizer.decode([97, 256, 98, 151_935]) == "a\ufffdb\ufffd"  # a padded vocabulary
    assert tokenizer.decode([]) == tokenizer.decode(np.zeros(0, np.int32)) == ""
    for ids in ([97, -1], np.array([97, -1])):
        with pytest.raises(ValueError, match="token id -1 is negative"):
            tokenizer.decode(ids)


@pytest.mark.parametrize("array", [np.array, np.int64, np.uint8, jnp.array])
def test_arrays_of_ids_are_read_as_lists_are(task, array):
    example = task.example("rl", 0)
    right, wrong = task.encode(example.demonstration), task.encode(f"{example.answer}=.")
    assert ByteTokenizer().decode(array(right)) == example.demonstration
    assert task.reward(example, array(right)) == 1.0 and task.reward(example, array(wrong)) == 0.0
    assert task.traits(array(wrong)) == task.traits(wrong) == {"working": 1.0}
