"""A file is read member by member, across the borders of what is read at once; what is broken is named by its place."""

import json

import pytest

from rollcli.data.webshop import json_stream
from rollcli.data.webshop.json_stream import array_members, object_members
from rollcli.errors import DatasetNotFound

ROWS = [{"name": "é\n“x”", "values": [1, 2.5, None, True]}, 123456, "text", [], {"a": {"b": "]}"}}]


@pytest.mark.parametrize("chunk", [1, 2, 7, 1 << 20])
def test_members_are_those_of_json_whatever_is_read_at_once(tmp_path, monkeypatch, chunk) -> None:
    monkeypatch.setattr(json_stream, "CHUNK", chunk)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS, indent=2, ensure_ascii=False), encoding="utf-8")
    assert [value for _, value in array_members(path)] == ROWS
    path.write_text(json.dumps({str(place): row for place, row in enumerate(ROWS)}), encoding="utf-8")
    assert [(key, value) for _, key, value in object_members(path)] == [(str(i), row) for i, row in enumerate(ROWS)]
    path.write_text(" [ ] ")
    assert list(array_members(path)) == []


def test_places_are_lines_and_columns(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(json_stream, "CHUNK", 4)
    path = tmp_path / "rows.json"
    path.write_text('[{"a": 1},\n  {"a": 2}, {"a": 3}]')
    assert [where for where, _ in array_members(path)] == [f"{path}:1:2", f"{path}:2:3", f"{path}:2:13"]


@pytest.mark.parametrize(
    "text, place",
    [
        ('{"a": 1}', ":1:1: not the JSON of WebShop: `[` should stand here, not `{`"),
        ("", ":1:1: not the JSON of WebShop: `[` should stand here, not the end"),
        ('[{"a": 1}\n {"b": 2}]', ":2:2: not the JSON of WebShop: `,` should stand here, not `{`"),
        ('[{"a": 1},\n {"b": tru}]', ":2:8: not the JSON of WebShop: Expecting value"),
        ('[{"a": 1}', ":1:10: not the JSON of WebShop: `,` should stand here, not the end"),
    ],
)
def test_what_is_broken_is_named_by_its_place(tmp_path, text, place) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(DatasetNotFound) as error:
        list(array_members(path))
    assert error.value.message == f"{path}{place}"


def test_a_file_that_is_absent_or_no_text_is_named(tmp_path) -> None:
    with pytest.raises(DatasetNotFound, match="cannot be read"):
        list(array_members(tmp_path / "none.json"))
    (tmp_path / "packed.json").write_bytes(b"\x1f\x8b\x08\xff")
    with pytest.raises(DatasetNotFound, match="not UTF-8"):
        list(object_members(tmp_path / "packed.json"))
