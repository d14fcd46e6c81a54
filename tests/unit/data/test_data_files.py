"""Reading data files: what comes back, and what each broken file says."""

from __future__ import annotations

import codecs
import json
import logging
import sys
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from hybridflow.config import PPOConfig
from hybridflow.config.data import DataConfig
from hybridflow.data import remote
from hybridflow.data.early_checks import check_data
from hybridflow.data.files import Rows, load_rows
from hybridflow.data.remote import hub_folder
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import ConfigError, DataError, ModelError
from hybridflow.models.files.build import load_config

ROWS = [{"prompt": f"q{i}", "n": i, "extra_info": {"index": i}} for i in range(5)]


def write(path: Path, rows: list[dict]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows))
    return str(path)


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_each_kind_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    rows = load_rows(write(tmp_path / f"a{suffix}", ROWS))
    assert list(rows) == ROWS and len(rows) == 5 and rows.columns == ["prompt", "n", "extra_info"]
    assert rows[-1] == ROWS[-1] and rows[1:3] == ROWS[1:3]
    with pytest.raises(IndexError):
        rows[5]


def test_files_of_different_kinds_join(tmp_path: Path) -> None:
    files = [
        write(tmp_path / "a.parquet", ROWS[:2]),
        write(tmp_path / "b.jsonl", [{**row, "more": 1} for row in ROWS[2:]]),
    ]
    rows = load_rows(files)
    assert [row["n"] for row in rows] == [0, 1, 2, 3, 4]
    assert [rows[i]["n"] for i in range(5)] == [0, 1, 2, 3, 4]
    assert rows.columns == ["prompt", "n", "extra_info", "more"]
    assert [row["n"] for row in rows.take([4, 0, 1, 3])] == [4, 0, 1, 3]


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_a_list_of_objects_keeps_its_length_where_a_field_is_null(tmp_path: Path, suffix: str) -> None:
    rows = [{"x": [{"b": None}, {"g": "x"}]}, {"x": [{"b": None}]}, {"x": []}]
    found = load_rows(write(tmp_path / f"a{suffix}", rows))
    assert [[each.get("g") for each in row["x"]] for row in found] == [[None, "x"], [None], []]
    assert all(each.get("b") is None for row in found for each in row["x"])
    says = {"role": "user", "content": "a", "name": None}
    messages = [{"messages": [says, {**says, "role": "assistant"}], "tools_kwargs": None}] * 2
    found = load_rows(write(tmp_path / f"b{suffix}", messages))
    assert [[each["role"] for each in row["messages"]] for row in found] == [["user", "assistant"]] * 2
    assert [row["tools_kwargs"] for row in found] == [None, None]


SEARCH, CALCULATE = {"search": {"create_kwargs": {"q": 1}}}, {"calc": {"create_kwargs": {"a": 2}}}


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
@pytest.mark.parametrize(
    "given",
    [
        [SEARCH, CALCULATE],
        [SEARCH, {"search": {"create_kwargs": {"r": 2}}}],
        [SEARCH, {"search": {"execute_kwargs": {"q": 2}}}, {**SEARCH, **CALCULATE}],
        [{"search": {"create_kwargs": {"where": [{"a": 1}, {"b": "x"}]}}}],
    ],
)
def test_arguments_of_tools_are_those_of_their_row(
    tmp_path: Path, suffix: str, given: list[dict[str, object]]
) -> None:
    """Arrow fills a row with the tools and the arguments of all others, as nulls."""
    rows = [{"prompt": "q", "extra_info": {"index": 0, "tools_kwargs": each}} for each in given]
    found = load_rows(write(tmp_path / f"a{suffix}", rows))
    assert [row["extra_info"]["tools_kwargs"] for row in found] == given
    assert [found[at]["extra_info"]["tools_kwargs"] for at in range(len(given))] == given
    for name in ("tools_kwargs", "interaction_kwargs"):
        found = load_rows(write(tmp_path / f"{name}{suffix}", [{name: each} for each in given]))
        assert [row[name] for row in found] == given
    mixed = [{"interaction_kwargs": {"name": "user", "query": "2?"}}, {"interaction_kwargs": {"name": "b"}}]
    rows = [{"extra_info": each} for each in [*mixed, {"index": 3}]]
    found = load_rows(write(tmp_path / f"b{suffix}", rows))
    assert [row["extra_info"].get("interaction_kwargs") for row in found] == [
        *(each["interaction_kwargs"] for each in mixed),
        None,
    ]


def test_a_null_argument_of_a_file_of_json_is_an_argument(tmp_path: Path) -> None:
    row = {"extra_info": {"tools_kwargs": {"search": {"create_kwargs": {"q": None}}}}}
    assert list(load_rows(write(tmp_path / "a.jsonl", [row]))) == [row]


def test_a_changed_row_does_not_change_the_table(tmp_path: Path) -> None:
    rows = load_rows(write(tmp_path / "a.json", ROWS))
    rows[0]["n"] = 99
    assert rows[0]["n"] == 0


def test_json_lines_under_the_name_json(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert list(load_rows(str(path))) == ROWS


def test_unicode_line_separators_do_not_end_a_json_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert list(load_rows(str(path))) == [{"prompt": "a\u2028b"}]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": }\n', r"a\.jsonl, line 3: not JSON"),
        ("a.jsonl", '{"a": 1}\n[1]\n', r"line 2: got list, wanted an object"),
        ("a.json", '[{"a": 1},\n {"a": ]', r"a\.json, line 2: not JSON"),
        ("a.json", '{"a": 1}', "got dict, wanted a list of objects"),
        ("a.json", "[1, 2]", "entry 0: got int"),
        ("a.json", "[]", "is empty: it has no rows"),
        ("a.jsonl", "", "is empty: it has 0 bytes"),
        ("a.jsonl", "\n\n", "is empty: it has no rows"),
        ("a.parquet", "not parquet", "no readable parquet file"),
        ("a.csv", "a,b", r"got the ending '\.csv', wanted \.parquet, \.json or \.jsonl"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError, match=said):
        load_rows(str(path))


WRONG = b"ab\xff"


def column_of(values: list[bytes], kind: pa.DataType) -> pa.Array:
    """A column of texts from bytes that are not looked at."""
    wide = pa.large_binary() if kind == pa.large_string() else pa.binary()
    return pa.Array.from_buffers(kind, len(values), pa.array(values, wide).buffers())


def with_one_wrong(kind: str) -> tuple[str, pa.Array]:
    """A column whose row 3 of 5 holds bytes that are not UTF-8, with its name."""
    texts = column_of([b"x", b"x", b"x", WRONG, b"x"], pa.string())
    ends = pa.array(range(6), pa.int32())
    many = column_of([b"x", b"x", b"x", WRONG, b"x"], pa.large_string())
    columns = {
        "text": texts,
        "large": many,
        "list": pa.ListArray.from_arrays(ends, texts),
        "struct": pa.StructArray.from_arrays([texts], ["inner"]),
        "messages": pa.ListArray.from_arrays(ends, pa.StructArray.from_arrays([texts], ["content"])),
        "map": pa.MapArray.from_arrays(ends, texts, many),
        "dictionary": pa.DictionaryArray.from_arrays(
            pa.array([0, 0, 0, 1, 0], pa.int32()), column_of([b"x", WRONG], pa.string())
        ),
    }
    return kind, columns[kind]


@pytest.mark.parametrize("kind", ["text", "large", "list", "struct", "messages", "map", "dictionary"])
def test_a_parquet_text_that_is_not_utf8_names_its_file_row_and_column(tmp_path: Path, kind: str) -> None:
    name, column = with_one_wrong(kind)
    good = pa.table({"prompt": ["q"] * 5, "data_source": ["math"] * 5})
    pq.write_table(good, tmp_path / "good.parquet")
    files = [str(tmp_path / "good.parquet"), str(tmp_path / "bad.parquet")]
    wanted = rf"bad\.parquet, row 3: column {name} holds text that is not UTF-8"
    for table in (good.append_column(name, column), good.set_column(1, "data_source", column)):
        pq.write_table(table, files[1])
        config = PPOConfig(data=DataConfig(train_files=files, train_batch_size=1))
        for read in (lambda: load_rows(files), lambda config=config: check_data(config)):
            with pytest.raises(DataError, match=wanted.replace(name, rf"({name}|data_source)")):
                read()


def test_a_name_that_is_not_utf8_is_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = [{"prompt": [{"role": "user", "content": "q"}], "extra": {"index": 1}}]
    for name in (b"prompt", b"content", b"index"):
        pq.write_table(pa.Table.from_pylist(rows), path, store_schema=False)
        content = bytearray(path.read_bytes())
        place = content.rindex(b"schema")
        content[content.index(name, place)] = 0xFF
        path.write_bytes(content)
        for read in (lambda: list(load_rows(str(path))), lambda: check_data(of_file(path))):
            with pytest.raises(
                DataError, match=r"a\.parquet: the name of a column or of a field is not UTF-8"
            ):
                read()


def of_file(path: Path) -> PPOConfig:
    return PPOConfig(data=DataConfig(train_files=[str(path)], train_batch_size=1))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "a.jsonl",
            b'{"prompt": "a"}\n{"prompt": "\xff"}',
            r"a\.jsonl, line 2, column prompt: the text is not",
        ),
        (
            "a.jsonl",
            b'{"a": 1, "b": [{"c": "\xc3("}]}',
            r"a\.jsonl, line 1, column b: the text is not UTF-8 \(inv",
        ),
        ("a.jsonl", b'{"a": 1}\n\xff', r"a\.jsonl, line 2: the text is not UTF-8"),
        ("a.json", b'[{"a": 1},\n {"a": "\xff"}]', r"a\.json, line 2: the text is not UTF-8"),
        ("a.json", b'{"a": "\xe2\x82"}', r"a\.json, line 1: the text is not UTF-8"),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_json_that_is_not_utf8_names_its_line(
    tmp_path: Path, name: str, content: bytes, said: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.write_bytes(codecs.BOM_UTF8 + content)
    with pytest.raises(DataError, match=said):
        load_rows(str(path))
    if not whole:  # too large to be read whole before a run
        monkeypatch.setattr("hybridflow.data.early_checks.WHOLE_BYTES", 0)
    if whole or name == "a.jsonl":
        with pytest.raises(DataError, match=said):
            check_data(of_file(path))


def test_empty_parquet_missing_file_folder_and_nothing(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "e.parquet")
    with pytest.raises(DataError, match="is empty: it has no rows"):
        load_rows(str(tmp_path / "e.parquet"))
    with pytest.raises(DataError, match=r"no file /no/such.parquet"):
        load_rows("/no/such.parquet")
    with pytest.raises(DataError, match="looked in"):
        load_rows("no_such.parquet")
    with pytest.raises(DataError, match="is a folder"):
        load_rows(str(tmp_path))
    with pytest.raises(DataError, match="no data files given"):
        load_rows([])


def test_missing_column_names_those_present() -> None:
    with pytest.raises(
        DataError, match=r"has no column answer; its columns: prompt, n, extra_info; set data\.x"
    ):
        Rows([ROWS]).require("prompt", "answer", hint="set data.x")


def test_remote_file_is_copied_once_and_again_when_it_changes(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/a.jsonl", b'{"n": 1}\n')
    address = "memory://bucket/a.jsonl"
    assert list(load_rows(address, tmp_path)) == [{"n": 1}]
    (copy,) = tmp_path.rglob("a.jsonl")
    stamp = copy.stat().st_mtime_ns
    assert list(load_rows(address, tmp_path)) == [{"n": 1}]
    assert copy.stat().st_mtime_ns == stamp, "the second load must use the copy"
    memory.pipe("/bucket/a.jsonl", b'{"n": 22}\n')
    assert list(load_rows(address, tmp_path)) == [{"n": 22}]
    copies = [path for path in tmp_path.rglob("a.jsonl") if path.read_bytes() == b'{"n": 22}\n']
    copies[0].write_bytes(b'{"n"')  # a copy that lost its end is not trusted
    assert list(load_rows(address, tmp_path)) == [{"n": 22}]
    memory.rm("/bucket", recursive=True)


def test_remote_mistakes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file memory://bucket/none.jsonl"):
        load_rows("memory://bucket/none.jsonl", tmp_path)
    with pytest.raises(ConfigError, match="cannot open nosuchprotocol://a"):
        load_rows("nosuchprotocol://a/b.jsonl", tmp_path)


def test_modelscope(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="wanted modelscope://OWNER/DATASET/PATH"):
        load_rows("modelscope://owner/a.jsonl")
    monkeypatch.setitem(sys.modules, "modelscope", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "modelscope.hub.file_download", None)
    with pytest.raises(ConfigError, match="install the extra 'remote'"):
        load_rows("modelscope://owner/name/a.jsonl")
    monkeypatch.setenv("HYBRIDFLOW_USE_MODELSCOPE", "1")
    assert hub_folder("/no/such") == "/no/such"
    with pytest.raises(ConfigError, match="HYBRIDFLOW_USE_MODELSCOPE"):
        hub_folder("owner/name")
    monkeypatch.delenv("HYBRIDFLOW_USE_MODELSCOPE")
    monkeypatch.setenv("VERL_USE_MODELSCOPE", "True")
    with pytest.raises(ConfigError, match="VERL_USE_MODELSCOPE"):
        hub_folder("owner/name")
    monkeypatch.delenv("VERL_USE_MODELSCOPE")
    assert hub_folder("owner/name") == "owner/name"


def test_a_name_that_is_neither_a_folder_nor_reachable_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")  # a port that nobody listens on
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(remote, "HUB_WAITS", (0.0, 0.0, None))
    caplog.set_level(logging.INFO, logger="hybridflow")
    for load in (load_tokenizer, load_config):
        caplog.clear()
        with pytest.raises(ModelError, match=r"no folder tinyy .* cannot be reached .*: give the path"):
            load("tinyy")
        assert len(caplog.messages) == 3 and "there is no folder tinyy" in caplog.messages[0]
    (tmp_path / "hub" / "models--owner--name").mkdir(parents=True)
    remote.require_hub("owner/name")


def test_a_flipped_byte_in_text_names_file_row_and_column(tmp_path: Path) -> None:
    rows = [{"n": i, "prompt": [{"role": "user", "content": f"question number {i}"}]} for i in range(2000)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[content.index(b"question number 1234") + 3] = 0xFF
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.parquet, row 1234: column prompt holds text that is not UTF-8"):
        load_rows(str(path))
    rows_as_they_are = Rows([pq.read_table(path)], source="a.parquet")
    for read in (lambda: rows_as_they_are[1234], lambda: list(rows_as_they_are)):
        with pytest.raises(DataError, match=r"a\.parquet, row 1234"):
            read()
    assert rows_as_they_are[1233]["n"] == 1233


def test_times_that_python_cannot_hold_name_their_row() -> None:
    table = pa.table({"n": [1, 2], "at": pa.array([0, 2**62], pa.timestamp("s"))})
    with pytest.raises(DataError, match=r"rows, row 1: column at cannot be read"):
        list(Rows([table]))


NESTED = "[" * 100_000 + "]" * 100_000
LONG_NUMBER = "7" * 5000


@pytest.mark.parametrize(
    ("value", "said"), [(NESTED, "nest too deeply"), (LONG_NUMBER, "a number cannot be read")]
)
@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_json_that_python_does_not_take_names_its_row(
    tmp_path: Path, suffix: str, value: str, said: str
) -> None:
    path = tmp_path / f"a.{suffix}"
    good, bad = '{"a": [1]}', f'{{"a": {value}}}'
    if suffix == "jsonl":
        path.write_text("\n".join([good, good, bad, good]))
        place = "line 3"
    else:
        path.write_text(f"[{good},\n {good} , {bad}]")
        place = "entry 2"
    with pytest.raises(DataError, match=rf"a\.{suffix}, {place}: .*{said}"):
        load_rows(str(path))


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize("column", ["images", "videos", "photos"])
def test_rows_with_images_that_nothing_reads_are_refused(tmp_path: Path, suffix: str, column: str) -> None:
    rows = [{"prompt": "a", column: []}, {"prompt": "b", column: None}, {"prompt": "c", column: ["c.png"]}]
    load_rows(write(tmp_path / f"a{suffix}", [*rows[:2], {"prompt": "d", column: []}])).refuse_media("x")
    filled = load_rows(write(tmp_path / f"b{suffix}", rows))
    with pytest.raises(DataError, match=rf"has a column {column}, filled in row 2, and nobody looks: use a"):
        filled.refuse_media("nobody looks", named=["photos"])
    filled.refuse_media("nobody looks", named=[column], read=True)
