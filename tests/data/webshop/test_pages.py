"""Pages show what the original's show, and actions lead from one to the next."""

import pytest

from rollcli.data.webshop.catalogue import Catalogue
from rollcli.data.webshop.pages import PageStyle, Visit, parse_action
from rollcli.data.webshop.products import Product

for package in ("bm25s", "Stemmer"):
    pytest.importorskip(package)


def soap(number: int, **other) -> Product:
    # The longer text of the others leaves the first result to the one with options.
    fields = {"options": {}, "features": ("pure " * 40,), "description": "", "prices": (float(number),)} | other
    return Product(
        f"B{number:03d}", f"Soap {number:03d}", "beauty", "soaps", "Bath › Soaps", **fields, attributes=("mild",),
        rating="4.5", instruction=None, instruction_attributes=(),
    )  # fmt: skip


OPTIONS = {"scent": ("rose", "[2 pack]  mint"), "size": ("s",)}
SHOP = Catalogue(
    [soap(1, options=OPTIONS, features=("one", "two"), description="long " * 10), *(soap(n) for n in range(2, 26))]
)


def visit(*actions: str, **style) -> Visit:
    found = Visit(SHOP, "mild soap", PageStyle(**{"separator": "|", "list_actions": False} | style))
    for action in actions:
        assert found.act(*parse_action(action)), action
    return found


def test_the_first_page_tells_the_wish_and_its_action() -> None:
    assert visit().render() == "WebShop|Instruction:|mild soap|Search"
    assert visit(list_actions=True).render().endswith("Search\nAvailable actions: search[words]")
    assert visit().act("click", "search") is False


def test_results_come_in_pages_of_ten() -> None:
    first = visit("search[Soap]")
    assert first.render().startswith("Back to Search|Page 1 (Total results: 25)|Next >|B001|Soap 001|$1.0|B002|")
    assert first.clickable() == ["Back to Search", "Next >", *(f"B{number:03d}" for number in range(1, 11))]
    second = visit("search[soap]", "click[Next >]")
    assert second.clickable()[:4] == ["Back to Search", "< Prev", "Next >", "B011"]
    assert not second.act("click", "b001") and second.act("click", "b020")
    last = visit("search[soap]", "click[next >]", "click[next >]")
    assert last.clickable() == ["Back to Search", "< Prev", "B021", "B022", "B023", "B024", "B025"]
    assert last.act("click", "< prev") and last.key() == second.key().replace("B020", "")


def test_no_results_are_a_page_too() -> None:
    assert visit("search[quantum]").render() == "Back to Search|Page 1 (Total results: 0)"
    assert visit("search[the]").clickable() == ["Back to Search"]


def test_an_item_shows_options_facts_and_what_was_chosen() -> None:
    item = visit("search[soap]", "click[B001]", "click[ROSE]", "click[[2 pack] mint]")
    assert item.options == {"scent": "[2 pack]  mint"}  # spaces do not count
    assert item.render() == (
        "You have clicked [2 pack]  mint.\nBack to Search|< Prev|scent|rose|[2 pack]  mint|size|s|Soap 001|Price: $1.0|"
        "Rating: 4.5|Description|Features|Reviews|Buy Now"
    )
    assert item.actions()[2:4] == ["click[rose]", "click[[2 pack]  mint]"]
    assert item.act("click", "Buy Now") and item.bought


def test_texts_of_an_item_lead_back_to_it_and_it_back_to_results() -> None:
    item = visit("search[soap]", "click[next >]", "search[soap]", "click[b001]", "click[s]")
    before = item.key()
    for name, text in (("Description", "long long "), ("Features", "one\ntwo"[:10]), ("Reviews", "No reviews found")):
        assert item.act("click", name)
        item.style = PageStyle("|", list_actions=False, longest_text=10)
        assert item.render() == f"You have clicked s.\nBack to Search|< Prev|{text}"
        assert not item.act("click", "Buy Now")
        assert item.act("click", "< Prev") and item.key() == before
    assert item.act("click", "< Prev") and item.page == 1 and item.options == {} and item.product is None
    assert visit("search[soap]", "click[b002]", "click[description]").render().endswith("No Description")


def test_what_can_be_shown_beside() -> None:
    item = visit("search[soap]", "click[b001]", show_attributes=True, repeat_instruction=True)
    assert item.render().startswith("Instruction:|mild soap|Back to Search|< Prev|") and "|Attributes|" in item.render()
    assert item.act("click", "attributes") and item.render().endswith("|mild|beauty|soaps|Bath › Soaps")
    assert not visit("search[soap]", "click[b001]").act("click", "attributes")


def test_states_are_equal_when_they_look_the_same() -> None:
    one = visit("search[soap]", "click[b001]", "click[s]", "click[rose]")
    other = visit("search[soap]", "click[b001]", "click[rose]", "click[features]", "click[< prev]", "click[s]")
    assert one.key() == other.key() != visit("search[soap]", "click[b001]", "click[rose]").key()
    assert visit("search[soap]", "click[back to search]").key() == visit().key()


def test_a_search_works_from_every_page() -> None:
    assert visit("search[soap]", "click[b001]", "click[s]", "search[soap]").key() == visit("search[soap]").key()


@pytest.mark.parametrize(
    "response, action",
    [
        ("search[red shoes]", ("search", "red shoes")),
        ("Click [Buy Now].", ("click", "Buy Now")),
        ("<think>click[a]</think>I go.\nAction: click[b]\nclick[c]", ("click", "b")),
        ("<action>click[a]</action> … <action>search[b]</action> click[c]", ("search", "b")),
        ("<answer>click[a]</answer>", ("click", "a")),
        ("First click[a], or click[b] [maybe]", ("click", "b")),
        ("click[a [b] c]", ("click", "a [b] c")),
        ("click[a [b c]", ("click", "a [b c")),
        ("search[camera action: sports]", ("search", "camera action: sports")),
        ("click[]", None), ("click[a", None), ("buy now", None), ("unclick[a]", None), ("", None),
    ],
)  # fmt: skip
def test_the_last_action_counts_and_one_that_is_marked_before_it(response, action) -> None:
    assert parse_action(response) == action
