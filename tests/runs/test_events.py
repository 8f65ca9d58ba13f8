import json

import pytest

from rollcli.runs.events import EventLog, JsonLines, Tail, finite, read_lines


def test_a_record_is_one_line_at_once(tmp_path):
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.write({"step": 1, "text": "é\nb"})
    assert (tmp_path / "a.jsonl").read_text(encoding="utf-8") == '{"step": 1, "text": "é\\nb"}\n'
    lines.write({"step": 2})
    lines.close()
    assert read_lines(tmp_path / "a.jsonl") == [{"step": 1, "text": "é\nb"}, {"step": 2}]


def test_events_carry_time_and_type(tmp_path):
    log = EventLog(tmp_path / "e.jsonl")
    log.emit("warning", message="low")
    (event,) = read_lines(tmp_path / "e.jsonl")
    assert event["type"] == "warning" and event["message"] == "low" and event["time"] > 1.6e9


def test_numbers_that_json_does_not_have_are_null():
    value = {"a": float("nan"), "b": [float("inf"), 1.5, (-float("inf"), True)], "c": "x", "d": None}
    assert finite(value) == {"a": None, "b": [None, 1.5, [None, True]], "c": "x", "d": None}


def test_half_a_surrogate_pair_is_written_as_its_escape(tmp_path):
    JsonLines(tmp_path / "a.jsonl").write({"text": "a\ud83db"})
    assert read_lines(tmp_path / "a.jsonl") == [{"text": "a\ud83db"}]


@pytest.mark.parametrize("torn", [b'{"step": 2', b'{"step": 2}', b'{"text": "\xc3', b"{"])
def test_a_torn_last_line_is_ignored_and_then_cut(tmp_path, torn):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"step": 1}\n' + torn)
    assert read_lines(file) == [{"step": 1}]
    JsonLines(file).write({"step": 3})
    assert file.read_bytes() == b'{"step": 1}\n{"step": 3}\n'


def test_a_file_that_is_nothing_but_torn(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"st')
    JsonLines(file).write({"step": 1})
    assert read_lines(file) == [{"step": 1}]


def test_lines_that_are_no_records_are_passed_over(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"a": 1}\nnonsense\n\xff\xfe\n\n5\n[1]\nnull\n{"a": 2}\n')
    assert read_lines(file) == [{"a": 1}, {"a": 2}]


def test_a_missing_file_has_no_records(tmp_path):
    assert read_lines(tmp_path / "gone.jsonl") == []


def append(file, text):
    with file.open("a", encoding="utf-8") as stream:
        stream.write(text)


def test_tail_follows_growth_line_by_line(tmp_path):
    file = tmp_path / "a.jsonl"
    tail = Tail(file)
    assert list(tail.new()) == []
    append(file, '{"n": 1}\n{"n": 2')
    assert list(tail.new()) == [{"n": 1}]
    assert list(tail.new()) == []
    append(file, '}\n{"n": 3}\n')
    assert list(tail.new()) == [{"n": 2}, {"n": 3}]
    assert tail.restarts == 0


def test_tail_reads_a_file_that_shrank_anew(tmp_path):
    file = tmp_path / "a.jsonl"
    tail = Tail(file)
    append(file, '{"n": 1}\n{"n": 2}\n')
    assert len(list(tail.new())) == 2
    with file.open("r+b") as stream:
        stream.truncate(9)
    assert list(tail.new()) == [{"n": 1}]
    assert tail.restarts == 1


def test_tail_reads_a_file_that_was_replaced_and_has_grown_since_anew(tmp_path):
    file = tmp_path / "a.jsonl"
    tail = Tail(file)
    append(file, '{"n": 1}\n{"n": 2}\n')
    assert len(list(tail.new())) == 2
    beside = tmp_path / "b"
    records = [{"n": 1}, {"m": 2}, {"m": 3}, {"m": 4}]
    beside.write_text("".join(json.dumps(record) + "\n" for record in records))
    beside.replace(file)
    assert list(tail.new()) == records


def test_tail_survives_a_file_that_goes_away(tmp_path):
    file = tmp_path / "a.jsonl"
    tail = Tail(file)
    append(file, '{"n": 1}\n')
    list(tail.new())
    file.unlink()
    assert list(tail.new()) == []
