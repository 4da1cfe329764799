import time
from fractions import Fraction

import pytest

from molt_gym.envs.math.comparison import is_right, number

RIGHT = [
    ("18", "18"), ("18.00", "18"), (r"\$18", "18"), ("$18", "18"), ("1,234", "1234"), (r"1{,}234", "1234"),
    (r"\frac12", "0.5"), (r"\dfrac{1}{2}", "1/2"), (r"-\frac{3}{4}", "-0.75"), (r"\frac{-3}{4}", r"-\frac34"),
    (r"2\frac{1}{2}", "2.5"), ("2 1/2", "2.5"), (r"1.5 \times 10^{3}", "1500"), (".5", "0.5"), ("5.", "5"),
    ("x = 5", "5"), ("5 cm", "5"), (r"5\text{ cm}^2", "5"), (r"90^\circ", "90"), (r"50\%", "50"), ("0.5", r"50\%"),
    (r"\text{E}", "E"), ("(E)", "E"), ("north", "North"), (r"\left(1, 2\right)", "(1,2)"), ("\u22125", "-5"),
    (r"2^{10}", "1024"), (r"\sqrt{12}", r"2\sqrt{3}"), ("(x+1)^2", "x^2+2x+1"), (r"\{2,1\}", r"\{1,2\}"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"), (r"(2, \infty)", "x > 2"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("1.5e3", "1500"), ("1e-5", r"10^{-5}"), ("1 000 000", "1000000"), ("5 million", "5,000,000"),
    ("50 percent", "0.5"), ("5 a day", "5"),
    ("5 m/s", "5"), (r"12\pi\text{ cm}^2", r"12\pi"), (r"90\degree", "90"), ("\u20ac5", "5"),
    ("**5**", "5"), ("5 \\\\", "5"), (r"\bigl(1,2\bigr)", "(1,2)"), (r"\approx 3.14", "3.14"), (r"+\infty", r"\infty"),
    ("\uff15", "5"), ("\u0665", "5"), ("\u20135", "-5"), ("2\u221a3", r"2\sqrt{3}"), ("\u221a12", r"2\sqrt{3}"),
    ("x\u00b2", "x^2"), ("(\u2212\u221e,2)\u222a(3,\u221e)", r"(-\infty,2)\cup(3,\infty)"), ("2pi", r"2\pi"),
    ("x > 2", r"(2, \infty)"), (r"1\pm\sqrt{2}", r"1+\sqrt{2}, 1-\sqrt{2}"), ("2, -2", r"\pm 2"),
    (r"\\frac{1}{2}", "0.5"), (r"2\\sqrt{3}", r"\sqrt{12}"),
    (r"\begin{pmatrix}a\\b\end{pmatrix}", r"\begin{pmatrix} a \\ b \end{pmatrix}"), ("the value of x = 5", "x = 5"),
    ("3 + 4 i", "4i+3"), ("2\u00bd", "2.5"), ("-\u2153", "-1/3"), ("1\u20442", "0.5"), ("10\u2075", "100000"),
    ("6.02 \u00d7 10\u00b2\u00b3", "6.02e23"),
    ("x\u207b\u00b9", "1/x"), ("101\u2082", "101_2"), ("\uff081\uff0c2\uff09", "(1,2)"), ("(1;2)", "(1,2)"),
    (r"\cfrac{1}{2}", "0.5"),
    (r"0.\overline{3}", r"\frac{1}{3}"), (r"\frac{1}{6}", r"0.1\overline{6}"), (r"\frac{1,000}{3}", r"\frac{1000}{3}"),
    (r"P(A) = \frac12", "0.5"), ("f(2)=5", "5"), (r"\angle ABC = 90^\circ", "90"), ("S_{10} = 55", "55"),
    ("|AB| = 5", "5"),
    ("x<2 or x>3", r"(-\infty,2)\cup(3,\infty)"), (r"x \ge 3 \text{ or } 0 < x \leq 1", r"(0,1] \cup [3,\infty)"),
    (r"x > -1 \text{ and } x < 2", "(-1,2)"), ("x > -1, x < 2", "-1 < x < 2"), ("a < b", "b > a"),
    (r"\{x \mid x<2 \text{ or } x > 3\}", r"(-\infty,2)\cup(3,\infty)"), (r"\{x \in \mathbb{R} : x>2\}", "x > 2"),
    (r"x^\frac{1}{2}", r"\sqrt{x}"), ("f^{-1}(2) = 5", "5"), ("a+b = 12", "12"), (r"5\sqrt3\text{ units}", r"5\sqrt3"),
    (r"5\,\text{N}\cdot\text{m}", "5"), (r"5 \text{ kg m}^{-3}", "5"), ("(0, oo)", r"(0,\infty)"),
    ("2 > x or 3 < x", "x<2 or x>3"), ("(-inf, 2) U (3, infinity)", r"(-\infty,2)\cup(3,\infty)"),
    (r"\mathbb R", r"\mathbb{R}"), (r"\varnothing", r"\emptyset"), (r"\langle 1, 2 \rangle", "(1,2)"),
    (r"10\,\frac{\text{m}}{\text{s}}", "10"), (r"10 \frac{\mathrm{m}}{\mathrm{s}^2}", "10"), ("5\u00b0C", "5"),
    ("\u20b95", "5"),
    (r"\boldsymbol{5}", "5"), (r"{\bf 5}", "5"), ("x**2", "x^2"), ("sqrt{2}", r"\sqrt{2}"), (r"\sim 4.5", "4.5"),
    ("\u22484.5", "4.5"),
    ("Option B", "B"), (r"\text{option (B)}", "B"), ("(B) 5", "B"), ("B. 5", "B"), (r"\textbf{(B)}\ 5", "B"),
    (r"\frac{1}{2^{99}}", "2^{-99}"),
]  # fmt: skip
WRONG = [
    ("101_2", "101_3"), ("2\u00bd", "10.5"), (r"0.\overline{3}", "0.3"), ("x_1 = 5", "x_2 = 5"), (r"x \ne = 5", "5"),
    ("Option A", "B"),
    ("P(A) = 5", "P(B) = 5"), (r"1\overline{2}", r"\frac{11}{9}"), ("x > 2", "y > 2"),
    ("x > 3, y > 4", "x > 4, y > 3"), ("x < 5, y > 2", "(2,5)"), ("2x - 5 = 5", "5"),
    ("x > 2 and x < 3", "x>2 or x < 3"), ("5 a^2", "5"), ("x<2 or x>3", r"(-\infty,2]\cup[3,\infty)"),
    ("x<2 or x>3", "(2,3)"), ("1;234", "1234"), ("5xy", "5"),
    (r"\frac{1}{2}", r"\frac{1}{3}"), ("5", "-5"), ("0.333", r"\frac{1}{3}"), ("12", "1 2"), ("(2,1)", "(1,2)"),
    (r"0.5\%", "0.5"), ("F", "E"), ("x^2", "x^3"), (r"\{1\}", r"\{1,2\}"), ("17+42", "59"),
    (r"6\cdot 3", "18"), ("3(6)", "18"), ("no idea", "5"), ("{", "5"), (r"\frac{1}{0}", "5"), ("1/0", "0"), ("", "5"),
    (r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("5 is not it", "5"), ("5 or more", "5"), ("5 minus one", "5"), ("5 million", "5"), ("5 pi", "5"), ("5 x", "5"),
    ("5 factorial", "5"), ("12 50", "1250"), ("y = 5", "x = 5"), ("left", "felt"), ("BCA", "ABC"), (r"\pm 2", "2"),
    ("(A) or (B)", "A"), ("A) or B", "A"), ("B) 5", "A"), ("x > 2", r"[2, \infty)"), ("2 pi", "2"),
    (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}"), (r"\frac{1}{2006!}", r"\frac{1}{2004!}"), ("0", r"\frac{1}{2^{99}}"),
    (r"\frac{1}{3 \cdot 2^{2006}}", r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "gold"), RIGHT)
def test_equal_answers_are_right(answer, gold):
    assert is_right(answer, gold) is True


@pytest.mark.parametrize(("answer", "gold"), WRONG)
def test_other_answers_are_wrong(answer, gold):
    assert is_right(answer, gold) is False


@pytest.mark.parametrize(
    ("answer", "gold", "loose"),
    [
        ("2^{10}", "1024", True),
        (r"\gcd(12, 18)", "6", False),
        ("(x+2)(x+3)", "x^2+5x+6", True),
        ("3x+4x-2", "7x-2", True),
    ],
)
def test_an_answer_that_leaves_the_work_undone_is_wrong_where_it_is_strict(answer, gold, loose):
    assert is_right(answer, gold) is loose and is_right(answer, gold, strict=True) is False


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("5cm", "5"), (r"\frac{ 1 }{ 2 }", "0.5"), (r"\theta = 5", "5"), ("6+5x+x^2", "x^2 + 5x + 6"),
     (r"7 \cdot x", "7x"), ("7*x", "7x"), (r"\frac{6}{8}", r"\frac{3}{4}")])
def test_another_order_or_notation_is_right_where_it_is_strict(answer, gold):
    assert is_right(answer, gold, strict=True) is True


@pytest.mark.parametrize(
    ("text", "value"),
    [("1,234.5", (Fraction(2469, 2), False)), (r"12.5\%", (Fraction(25, 2), True)), ("1,23", None),
     ("1e9", (Fraction(10**9), False)), ("1e999", None), ("2 million", (Fraction(2 * 10**6), False)),
     (r"10^{99}", None), (r"1 \times 10^{999}", None), ("9" * 2000, None), ("42x", None), ("-", None)])
def test_a_number_is_exact_and_of_a_bounded_size(text, value):
    assert number(text) == value


@pytest.mark.parametrize(
    "piece", ["~", "1", "12", "1 ", "1,", "1/", "a ", "a.", "x<1 or ", "f(", "{", r"\text{", r"\cdot"])
def test_a_text_as_long_as_an_answer_may_be_takes_no_time_before_algebra(monkeypatch, piece):
    monkeypatch.setattr("molt_gym.envs.math.comparison.equal", lambda *given: False)
    text = piece * (980 // len(piece))
    begin = time.process_time()
    for answer in (text, f"5 {text}x", f"\\approx{text}A", f"{text}=1", rf"\{{x|{text}\}}"):
        is_right(answer, "5")
        is_right("5", answer)
    assert time.process_time() - begin < 0.5
