r"""Equal answers score 1, others 0, and no text whatever raises, hangs or runs code."""

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollcli.errors import RewardError
from rollcli.rewards.isolation import IsolatedCaller, RewardFailure
from rollcli.rewards.math import extract_answer, math

DATA = Path(os.environ.get("ROLL_TEST_DATA") or Path(__file__).parents[2].parent / "shared" / "data")


def rows(name: str) -> list[dict]:
    if not (DATA / name).is_file():
        pytest.skip(f"no {name} under {DATA}; set ROLL_TEST_DATA")
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{4}", "4"),
        (r"first \boxed{1}, no, \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\left\{ 1, 2 \right\}} done", r"\left\{ 1, 2 \right\}"),
        (r"\boxed{12} and then cut off \boxed{34", "12"),
        (r"\boxed{}", ""),
        (r"#### 3 but \boxed{4}", "4"),
        ("reasoning\n#### 1,080", "1,080"),
        ("#### 1\n#### 2\n", "2"),
        ("#### Step 1: think\nThe answer is 7.", "7"),
        ("####", ""),
        ("The answer is 5. No, the answer is $6$. I hope it is correct.", "6"),
        ("**Final Answer:**\n\n**18**", "18"),
        ("Answer: B", "B"),
        ("to see whether the answer is correct we add them", None),
        ("nothing here", None),
        ("", None),
    ],
)
def test_where_the_answer_is_found(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("found", "gold"),
    [
        ("72", "72"),
        ("72.0", "72"),
        ("-3", "−3"),
        ("+5", "5"),
        ("$1,234.50", "1234.5"),
        (r"\$32,\!348", "32348"),
        ("10{,}080", "10,080"),
        (r"11,\! 111", "11111"),
        ("1 234 567", "1234567"),
        ("€18", "18"),
        ("1/2", "0.5"),
        (r"\dfrac{14}{3}", "14/3"),
        (r"-\frac43", "-4/3"),
        (".5", r"\frac12"),
        ("50%", "50"),
        (r"50\%", "0.5"),
        ("0.5", "50%"),
    ],
)
def test_equal_plain_numbers(found, gold):
    assert math(rf"\boxed{{{found}}}", gold).score == 1.0


@pytest.mark.parametrize(
    ("found", "gold"),
    [("72", "73"), ("1,2", "12"), ("1,23", "123"), ("0.333", "1/3"), ("5%", "50%"), ("1/0", "1"), ("12", "1,2")],
)
def test_unequal_numbers(found, gold):
    result = math(rf"\boxed{{{found}}}", gold)
    assert (result.score, result.accuracy) == (0.0, 0.0)


def test_plain_numbers_need_no_sympy():
    code = (
        "import sys; from rollcli.rewards.math import math\n"
        r"assert math('so \\boxed{1,080}', 'text #### 1080').score == 1.0"
        "\nassert math('', '1').score == 0.0\nassert not {'sympy', 'math_verify'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("response", "gold"),
    [
        (r"\boxed{(x+1)^2}", "x^2+2x+1"),
        (r"\boxed{-2, 1}", "1,-2"),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}"),
        (r"\boxed{C}", r"\text{(C)}"),
        (r"\boxed{72\text{ eggs}}", "72"),
        (r"\boxed{72 dollars}", "72"),
        (r"The answer is $\frac{\sqrt{3}}{3}$.", r"\frac{1}{\sqrt{3}}"),
        ("So she makes $18 a day.", "#### 18"),
        (r"We get $x = \frac{7}{2}$.", r"\boxed{x=\frac72}"),
        (r"\text{east}", r"\text{east}"),
    ],
)
def test_equal_expressions(response, gold):
    assert math(response, gold).score == 1.0


def test_gold_number_that_is_not_text():
    assert math(r"\boxed{72}", 72).score == 1.0


@pytest.mark.parametrize("response", ["", " ", r"\boxed{}", "####", "no idea", "$", r"\boxed{x+}", "\x00", "\ud800"])
def test_no_answer_is_counted(response):
    result = math(response, "1")
    assert (result.score, result.metrics) == (0.0, {"unparsable": 1.0})


def test_wrong_but_readable_is_not_counted_as_unparsable():
    assert math(r"\boxed{2}", "1").metrics == {"unparsable": 0.0}
    assert math(r"\boxed{x+2}", "x").metrics == {"unparsable": 0.0}


def test_no_digit_is_picked_out_of_an_answer_that_does_not_parse():
    assert math(r"\boxed{-]\sum_{k=1}^}", "1").score == 0.0


@pytest.mark.parametrize("gold", ["", "  ", "some text #### ", r"\boxed{}", "x" * 600, None])
def test_gold_that_cannot_be_read_is_a_data_error(gold):
    with pytest.raises(RewardError, match="gold answer"):
        math(r"\boxed{1}", gold)


HOSTILE = {
    "code": r"\boxed{__import__('os').system('touch x')}",
    "code stated": "The answer is __import__('os').system('touch x') 1",
    "code bare": "__import__('os').system('touch x')",
    "tower": r"\boxed{9**9**9**9}",
    "tower latex": r"\boxed{9^{9^{9^{9}}}}",
    "tower bare": "9**9**9**9",
    "big power": r"\boxed{10**10**5}",
    "factorial": r"\boxed{999999999!}",
    "power of 10^5 digits": rf"\boxed{{2^{{{'9' * 100_000}}}}}",
    "power with a base of 10^5 digits": rf"The answer is {'9' * 100_000}^2.",
    "power of 10^5 digits bare": "so it is\n9**" + "9" * 100_000,
    "power whose value has 10^5 digits": r"\boxed{10^{99999}}",
    "long number": rf"\boxed{{x+{'9' * 400}}}",
    "long answer": rf"\boxed{{{'x+' * 5000}}}",
    "nested braces": rf"\boxed{{{'{' * 200}1{'}' * 200}}}",
    "nested parentheses": "The answer is " + "(" * 200 + "1" + ")" * 200,
    "nested roots": r"\boxed{" + r"\sqrt{" * 60 + "1" + "}" * 61,
    "open boxes": r"\boxed{" * 20_000,
    "open boxes and fractions": r"\boxed{\frac{" * 5_000,
    "hashes": "#### " * 20_000,
    "answers": "answer is " * 20_000,
    "dollars": "$" * 20_000,
    "brackets": " [" * 20_000,
}


def test_hostile_answers_score_zero_in_bounded_time_and_run_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    requests = [("math", {"response": response, "answer": "1"}) for response in HOSTILE.values()]
    with IsolatedCaller() as caller:
        results = caller.call_many(requests, timeout_s=10)
    failed = {case: result for case, result in zip(HOSTILE, results) if isinstance(result, RewardFailure)}
    assert not failed
    assert [result.score for result in results] == [0.0] * len(HOSTILE)
    assert list(tmp_path.iterdir()) == []


def test_math_is_right_from_threads():
    cases = [
        (r"\boxed{x+x}", "2x", 1.0),
        (r"\boxed{9**9**9**9}", "1", 0.0),
        (r"\boxed{\frac{2}{4}+x}", r"x+\frac12", 1.0),
    ]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda case: math(*case[:2]).score, cases * 4))
    assert results == [score for _, _, score in cases] * 4


LATEX = r"""
    \boxed{ } { ( ) ^ ** 9 1 x y \frac \sqrt $ \( \) + - / , = \text{ \infty [ ] ! % \sum_{k=1}^ \int #### \log & \\ _
    \begin{pmatrix} \end{pmatrix} \left \right \pi π ½ . < \le \pm | ' \lim_{x\to0} \pmod \circ 10000 \binom \cdot
"""
PIECES = [*LATEX.split(), " ", "\n", "answer is ", "\ud800", "\x00", "٣", "𝟏"]


def test_no_text_whatever_raises():
    draw = random.Random(0)
    texts = ["".join(draw.choices(PIECES, k=draw.randint(1, 30))) for _ in range(700)]
    texts += [rf"\boxed{{{''.join(draw.choices(PIECES, k=draw.randint(1, 10)))}}}" for _ in range(700)]
    golds = ["1", "x^2+1", r"\frac{1}{2}", "(1,2)", r"\begin{pmatrix}1\\2\end{pmatrix}"]
    requests = [("math", {"response": text, "answer": draw.choice(golds)}) for text in texts]
    with IsolatedCaller() as caller:
        results = caller.call_many(requests, timeout_s=5)
    assert [result.message for result in results if isinstance(result, RewardFailure)] == []
    assert {result.score for result in results} <= {0.0, 1.0}


@pytest.mark.parametrize("name", ["gsm8k/train.jsonl", "gsm8k/test.jsonl"])
def test_gsm8k_gold_against_itself(name):
    golds = [row["answer"] for row in rows(name)]
    assert [gold for gold in golds if math(gold, gold).score != 1.0] == []
    finals = [gold.rsplit("#### ", 1)[1] for gold in golds]
    assert [gold for gold, final in zip(golds, finals) if math(f"The answer is ${final}.", gold).score != 1.0] == []
    assert [gold for gold, final in zip(golds, finals) if math(rf"\boxed{{{final}1}}", gold).score != 0.0] == []


def test_math500_solution_against_gold():
    problems = rows("math500/math500_oai.jsonl")
    assert [p["answer"] for p in problems if math(p["solution"], p["answer"]).score != 1] == []


def test_math500_gold_found_in_plain_prose():
    problems = rows("math500/math500_oai.jsonl")
    missed = [p["answer"] for p in problems if math(f"So we get ${p['answer']}$ at last.", p["solution"]).score != 1]
    assert missed == []


def test_math500_answer_of_another_problem():
    problems = rows("math500/math500_oai.jsonl")
    taken = [
        (one["answer"], other["answer"])
        for one, other in zip(problems, problems[1:])
        if math(other["solution"], one["answer"]).score == 1
    ]
    assert taken == [("5", "x=5"), ("7", "7"), ("3", "3")]  # neighbors whose answers are the same


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        # What a small model wrote when its budget ran out: the right number stands on the way, not at the end.
        ("(10 * 30)(7x) = 1800  conversion\nflips 1254 = 1800 cuts  over 25  -u", "1800", 0.0),
        ("* After one final walk of 3*12\n* She has walked at", "3", 0.0),
        ("3 miles in all, I think.\nNo, wait", "3", 0.0),
        ("Then she ran 30 minutes, so she ran for 3 *", "3", 0.0),
        ("so 1 + 2 =", "2", 0.0),
        ("So 48 + 24 = 72", "72", 1.0),
        ("It is $72.", "72", 1.0),
        ("First 5.\n\nThat leaves 5-3", "3", 1.0),
        ("so we get -4", "-4", 1.0),
        ("so we get -4", "4", 0.0),
        (r"Hence $x = \frac{1}{2}$", "1/2", 1.0),
        ("two", "2", 0.0),
    ],
)
def test_an_unmarked_answer_is_what_the_last_line_ends_with(response: str, answer: str, score: float) -> None:
    assert math(response, answer).score == score
