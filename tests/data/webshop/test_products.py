"""Products in both forms of the files, their defaults, and what is broken."""

import json

import pytest

from rollcli.data.webshop.products import read_products
from rollcli.errors import DatasetNotFound

ORIGINAL = {
    "asin": "B000000001",
    "name": "Red Cotton T-Shirt",
    "category": "fashion",
    "query": " Men's T-Shirts ",
    "product_category": "Clothing › Men › Shirts",
    "full_description": "A shirt.",
    "small_description": ["100% cotton", "machine wash"],
    "pricing": "$1,005.99$1,012.50",
    "customization_options": {"Color": [{"value": " Black/White ", "image": "x"}, {"value": "Red"}], "Size": None},
    "images": ["http://x"],
}
BARE = {"asin": "B000000002", "name": "Tea", "category": "grocery", "query": "tea", "product_category": "Food"}


def read(folder, products, attributes=None, most=None):
    path = folder / "products.json"
    path.write_text(json.dumps(products))
    extra = None
    if attributes is not None:
        extra = folder / "attributes.json"
        extra.write_text(json.dumps(attributes))
    return read_products(path, extra, most)


def test_the_originals_form(tmp_path) -> None:
    attributes = {"B000000001": {"attributes": ["long sleeve"], "instruction": "Find", "instruction_attributes": ["a"]}}
    (shirt,) = read(tmp_path, [ORIGINAL], attributes)
    assert shirt.query == "men's t-shirts" and shirt.features == ("100% cotton", "machine wash")
    assert shirt.options == {"color": ("black | white", "red")}
    assert shirt.prices == (1005.99, 1012.5) and shirt.price_tag == "$1005.99 to $1012.5"
    assert (shirt.attributes, shirt.instruction, shirt.instruction_attributes) == (("long sleeve",), "Find", ("a",))


def test_lists_in_their_places_and_the_products_own_attributes(tmp_path) -> None:
    row = BARE | {"options": {"Size": ["S/M", "L"]}, "pricing": [5], "attributes": ["x"], "small_description": "one"}
    (tea,) = read(tmp_path, [row])
    assert tea.options == {"size": ("s | m", "l")} and tea.prices == (5.0,) and tea.price(seed=1) == 5.0
    assert tea.attributes == ("x",) and tea.features == ("one",)


def test_defaults_are_the_originals(tmp_path) -> None:
    (tea,) = read(tmp_path, [BARE | {"pricing": None, "full_description": None}])
    assert tea.prices == (100.0,) and tea.price_tag == "$100.0" and tea.attributes == ("DUMMY_ATTR",)
    assert (tea.description, tea.features, tea.options, tea.rating) == ("", (), {}, "N.A.")


def test_a_price_from_a_range_depends_on_seed_and_product_alone(tmp_path) -> None:
    shirt, other = read(tmp_path, [ORIGINAL, ORIGINAL | {"asin": "B000000003"}])
    prices = [shirt.price(seed) for seed in range(20)]
    assert prices == [shirt.price(seed) for seed in range(20)] and len(set(prices)) == 20
    assert all(1005.99 <= price <= 1012.5 for price in prices) and shirt.price(0) != other.price(0)


def test_doubles_and_odd_identities_are_left_out_and_the_beginning_is_enough(tmp_path) -> None:
    rows = [BARE, BARE | {"name": "Again"}, BARE | {"asin": "nan"}, BARE | {"asin": "B0000000012"}, ORIGINAL]
    assert [product.name for product in read(tmp_path, rows)] == ["Tea", "Red Cotton T-Shirt"]
    assert [product.name for product in read(tmp_path, rows, most=4)] == ["Tea"]


@pytest.mark.parametrize(
    "rows, message",
    [
        ([BARE, ["x"]], f":1:{len(json.dumps(BARE)) + 4}: a product is an object, this is list"),
        ([{"asin": "B1", "name": None}], ":1:2: product `B1`: `name` should be a text, is None"),
        ([BARE | {"pricing": "free"}], ":1:2: product `B000000002`: ValueError: `pricing` names no price in dollars"),
        ([BARE | {"pricing": ["low"]}], ":1:2: product `B000000002`: ValueError: could not convert"),
        ([BARE | {"options": {"size": [3]}}], ":1:2: product `B000000002`: AttributeError"),
        ([BARE | {"attributes": "soft"}], ":1:2: product `B000000002`: ValueError: `attributes` should be a list"),
        ([], "has no product"),
    ],
)
def test_what_is_broken_is_named_by_place_and_product(tmp_path, rows, message) -> None:
    with pytest.raises(DatasetNotFound) as error:
        read(tmp_path, rows)
    assert message in error.value.message and "products.json" in error.value.message


def test_broken_attributes_are_named(tmp_path) -> None:
    with pytest.raises(DatasetNotFound, match=r"attributes\.json:1:2: product `B000000002`: TypeError: should be"):
        read(tmp_path, [BARE], {"B000000002": ["soft"]})
