import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_gym.envs.math import MathEnv
from molt_gym.envs.math.answers import find_answer, find_boxed
from molt_gym.envs.math.comparison import is_right
from molt_gym.envs.math.problems import Problem

HALF = r"\boxed{\frac{1}{2}}"
TABLE = [
    (HALF, r"\frac{1}{2}", r"\frac{1}{2}", True),
    (HALF, r"\frac{1}{3}", r"\frac{1}{2}", False),
    (r"\boxed{5}. wrong; \boxed{7}", "7", "7", True),
    (r"\boxed{5}. wrong; \boxed{7}", "5", "7", False),
    (r"\fbox{42}", "42", "42", True),
    (r"It is \boxed{\frac{1}{2}", "2", None, False),
    (r"\boxed{\text{E}}", "E", r"\text{E}", True),
    (r"\boxed{\{1,2\}}", r"\{2,1\}", r"\{1,2\}", True),
    (r"<think>\boxed{5}</think> I do not know.", "5", None, False),
    (r"<think>It is \boxed{5}", "5", None, False),
    ("I do not know.", "5", None, False),
]
"""Reply, right answer, what is found, whether it is right."""


@pytest.mark.parametrize("rule", ["any", "boxed"])
@pytest.mark.parametrize(("reply", "gold", "found", "right"), TABLE)
def test_extraction_grader_and_the_end_of_an_episode_agree(monkeypatch, reply, gold, found, right, rule):
    assert find_answer(reply, rule) == found
    assert (found is not None and bool(is_right(found, gold))) is right
    env = MathEnv(turns=2, rule=rule)
    monkeypatch.setattr(env._source, "task", lambda index: Problem("?", gold))
    env.reset(seed=0)
    observation, reward, terminated, _, info = env.step({"role": "assistant", "content": reply})
    assert (reward, terminated) == (float(right), right)
    assert info["outcome"] == ("no_answer" if found is None else "right" if right else "wrong")
    if not right:
        assert observation["messages"][-1]["content"].startswith("No answer" if found is None else "Wrong")


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"\boxed{5} and then \boxed{7", "5"),
        (r"I will put it in \boxed{}. It is \boxed{ 7 }", " 7 "),
        (r"\boxed {3}, so \boxed 4.", "4"),
        (r"a } and { then \boxed{1}", "1"),
        (r"\boxed{a\\}b}", r"a\\"),
        ("<think>5</think>the answer is 6", "6"),
        ("The answer is 5. No, the answer is 7 cm. It is not 9.", "7 cm"),
        ("**Answer:** 42", "42"),
        ("Final answer: $\\frac{1}{2}$, which is 50%.", r"\frac{1}{2}"),
        (r"The answer is \(x^2\).", "x^2"),
        ("The answer is 3.5", "3.5"),
        ("So 3 times 4 gives 1,200 or so", "1,200"),
        ("From 3-5, minus: -8", "-8"),
        ("It is 3/4 of it", "3/4"),
        ("It is .5", ".5"),
        ("It is 2 1/2 of it", "2 1/2"),
        (r"It is 2\frac12 of it", r"2\frac12"),
        ("It is 1.5e3", "1.5e3"),
        (r"It is 3 \times 10^{-5}.", r"3 \times 10^{-5}"),
        ("It is 2^10.", "2^10"),
        (r"It is 5 \%.", r"5 \%"),
        (r"So it is $\sqrt{2}$.", r"\sqrt{2}"),
        ("So\n\\[\nx = 2\\pi\n\\]", r"2\pi"),
        ("She pays $5 and has $3 left", "3"),
        ("It is $5$ of $6$ or 7", "7"),
        ("<answer>x^2</answer>", "x^2"),
        ("Answer: <answer> $x$ </answer> as 5 = 5", "x"),
        (r"\boxed 1/2", "1/2"),
        (r"\boxed 1,234, so", "1,234"),
        (r"It is $-\frac{3}{4}$", r"-\frac{3}{4}"),
        ("The answers are the same", "the same"),
        ("The answer is 5, which is prime.", "5"),
        ("The answer is 1, 2 and 3 because 6 = 1 + 2 + 3.", "1, 2 and 3"),
        ("The answer is therefore option B.", "B"),
        ("40 + 2 = 42\n#### 42\nHere are 7 more", "42"),
        ("The answer is 5.\n#### Checks\nThere are 2.", "5"),
        (r"\\boxed{5}", "5"),
        ("", None),
    ],
)
def test_without_one_clear_box_the_rules_are_these(reply, found):
    assert find_answer(reply) == found


@pytest.mark.parametrize("reply", ["The answer is 42.", "42", "Answer: $42$"])
def test_the_strict_rule_wants_a_box(reply):
    assert (find_answer(reply), find_answer(reply, "boxed")) == ("42", None)


balanced = st.recursive(
    st.text(st.characters(exclude_characters="{}\\", codec="utf-8"), max_size=6) | st.sampled_from(
        [r"\{", r"\}", r"\\", r"\frac", r"\,", r"\left\{"]),
    lambda parts: st.lists(parts, max_size=4).map("".join) | parts.map(lambda part: f"{{{part}}}"),
    max_leaves=20,
)


@given(balanced.filter(str.strip), st.text(max_size=20))
def test_what_is_in_a_box_comes_back_as_it_is(content, before):
    if "think>" in before + content:
        return
    before = before.replace("\\", "").replace("{", "")
    assert find_answer(f"{before}\\boxed{{{content}}} as asked", "boxed") == content


@given(st.text(st.sampled_from("\\boxedfrac{} 0123456789.,/$-answer is<think>")))
def test_no_text_raises(text):
    find_answer(text)
    if (found := find_boxed(text)[0]) is not None:
        assert found in text


@pytest.mark.parametrize(
    "piece", ["\\boxed{", "{", "}", "answer is ", "1", "1,", "1/", "\\frac{1}{", "$", "\\(", "-", " ", "<think>",
              "<answer>", "1 ", "1e", "1^", "10^{", ".", "\\",
              "\\boxed ", "####", "\n#### "])
def test_a_text_of_a_million_characters_takes_no_time(piece):
    text = piece * (1_000_000 // len(piece))
    begin = time.process_time()
    find_answer(text)
    assert is_right(text, "7") is False
    assert is_right(f"\\boxed{{{text}}}", "7") is False
    assert time.process_time() - begin < 5
