"""Forms of a text, on small cases."""

from rollcli.rewards.ifeval import layout


def test_marks() -> None:
    assert layout.number_placeholders("[a] and [b]", 2) and not layout.number_placeholders("[a\n] [b", 1)
    assert layout.postscript("Bye\nP. S. more", "P.S.") and layout.postscript("p.p.s x", "P.P.S")
    assert not layout.postscript("Bye", "P.S.")
    assert layout.number_bullet_lists("* a\n - b\n**c**", 2) and not layout.number_bullet_lists("* a", 2)
    assert layout.number_highlighted_sections("*a* and **b**", 2) and not layout.number_highlighted_sections("**", 1)
    assert layout.title("x\n<<T>>") and not layout.title("<<>>") and not layout.title("<<a\n>>")


def test_parts() -> None:
    assert layout.multiple_sections("SECTION 1\na\nSECTION 2\nb", "SECTION", 2)
    assert not layout.multiple_sections("SECTION one", "SECTION", 1)
    assert layout.two_responses("a ****** b") and not layout.two_responses("a ****** a")
    assert not layout.two_responses("a")
    assert layout.repeat_prompt("Do THIS. Done", "do this.") and not layout.repeat_prompt("Done. Do this.", "do this.")
    assert layout.constrained_response("So: My answer is no.") and not layout.constrained_response("no")


def test_json() -> None:
    assert layout.json_format('```json\n{"a": 1}\n```') and layout.json_format("[1]")
    assert not layout.json_format("so {}") and not layout.json_format("[" * 100_000)
