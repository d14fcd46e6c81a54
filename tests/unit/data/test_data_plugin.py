"""Loading a user's object: what comes back, and what each mistake says."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from hybridflow.data.plugin import join_spec, load_class, load_entries, load_function, load_object
from hybridflow.errors import ConfigError
from hybridflow.tools.base_tool import BaseTool


def test_object_from_file_is_loaded_once(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class A:\n    def f(self): return 3\n")
    first = load_object(f"{file}:A", key="data.custom_cls")
    assert first().f() == 3
    assert load_object(f"{file}:A", key="data.custom_cls") is first
    assert load_object(f"{file}:A.f", key="data.custom_cls") is first.f


def test_changed_file_is_loaded_anew(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("VALUE = 1\n")
    assert load_object(f"{file}:VALUE", key="data.custom_cls") == 1
    file.write_text("VALUE = 2\n")
    assert load_object(f"{file}:VALUE", key="data.custom_cls") == 2


def test_object_from_module() -> None:
    assert load_object("math:sqrt", key="data.custom_cls")(9.0) == 3.0


def test_a_function_without_a_name_of_its_own_has_the_one_it_is_asked_for_by(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import functools\nhalf = functools.partial(round, ndigits=1)\n")
    assert load_function(f"{file}:half", key="algorithm.adv_estimator").__name__ == "half"


def test_annotations_of_a_file_are_its_own_objects(tmp_path: Path) -> None:
    file = tmp_path / "plain.py"
    file.write_text("def f(x: int): return x\n")
    assert load_object(f"{file}:f", key="data.custom_cls").__annotations__["x"] is int


def test_file_with_dataclass_and_annotations_imports(tmp_path: Path) -> None:
    file = tmp_path / "d.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass D:\n    "
        "x: int = 1\n"
    )
    assert load_object(f"{file}:D", key="data.custom_cls")().x == 1


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("no_colon", "wanted path/to/file.py:name"),
        ("mine.py", "wanted path/to/file.py:name"),
        ("/no/such/file.py:f", "no file /no/such/file.py"),
        ("no_such_module_at_all:f", "no module named 'no_such_module_at_all'"),
        ("math:no_such_name", "math has no name 'no_such_name'"),
        ("some/folder:f", "must end in .py"),
    ],
)
def test_mistakes_are_named(spec: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load_object(spec, key="data.custom_cls")
    assert str(caught.value).startswith("data.custom_cls: ")


def test_import_that_raises_shows_the_last_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("x = 1\ny = x / 0\n")
    with pytest.raises(ConfigError, match=r"ZeroDivisionError: division by zero \(at .*bad.py:2\)"):
        load_object(f"{file}:y", key="data.custom_cls")
    file.write_text("def f(:\n")
    with pytest.raises(ConfigError, match="SyntaxError"):
        load_object(f"{file}:f", key="data.custom_cls")
    file.write_text("import no_such_package_here\n")
    with pytest.raises(ConfigError, match="no_such_package_here"):
        load_object(f"{file}:f", key="data.custom_cls")


def test_join_spec() -> None:
    assert join_spec(None, None, key="k") is None
    assert join_spec("a.py", "f", key="k") == "a.py:f"
    assert join_spec("a.py:f", "f", key="k") == "a.py:f"
    assert join_spec("a.py:f", None, key="k") == "a.py:f"
    with pytest.raises(ConfigError, match="which object"):
        join_spec("a.py", None, key="k")
    with pytest.raises(ConfigError, match="set the path"):
        join_spec(None, "f", key="k")


def test_a_file_of_entries_names_classes_as_verl_does(tmp_path: Path) -> None:
    path = tmp_path / "entries.yaml"
    path.write_text("things: [{class_name: pathlib.Path, number: 1e-3}]")
    (entry,) = load_entries(str(path), "things", "class_name", key="KEY")
    assert entry["number"] == 0.001, "read as a run's own configuration is"
    assert load_class(entry["class_name"], key="KEY") is Path
    assert load_class("verl.tools.base_tool.BaseTool", key="KEY") is BaseTool
    with pytest.raises(ConfigError, match=r"hybridflow\.tools\.search_tool has no name 'Thing'"):
        load_class("verl.tools.search_tool.Thing", key="KEY")
    with pytest.raises(ConfigError, match=r"verl\.nowhere\.at_all\.Thing: nothing here takes its place"):
        load_class("verl.nowhere.at_all.Thing", key="KEY")
    with pytest.raises(ConfigError, match=r"entry 0: .* wanted a name"):
        load_entries(str(path), "things", "name", key="KEY")
    with pytest.raises(ConfigError, match="has no list of entries"):
        load_entries(str(path), None, "class_name", key="KEY")


CLASSES = """
class Good:
    async def execute(self, instance_id, parameters, **kwargs): ...

class Loose:
    def execute(self, *args): ...

class Few:
    async def execute(self, parameters): ...

class Without: ...

class Later(__import__("collections").Counter): ...
"""


@pytest.mark.parametrize(
    ("name", "runs", "says"),
    [
        ("Good", True, None),
        ("Loose", True, None),
        ("Few", False, r"got Few\.execute\(self, parameters\), wanted def execute\(self, instance_id"),
        ("Without", False, r"Without has no method execute\(self"),
        ("Later", True, r"Later has no method execute\(self"),
    ],
)
def test_methods_of_a_class_are_read_before_it_is_imported(
    tmp_path: Path, name: str, runs: bool, says: str | None
) -> None:
    mark = tmp_path / "imported"
    (tmp_path / "classes.py").write_text(f"open({str(mark)!r}, 'w').close()\n{CLASSES}")
    methods = {"execute(self, instance_id, parameters, **kwargs)": ("self", "instance_id", "parameters")}
    expected = pytest.raises(ConfigError, match=says) if says else nullcontext()
    with expected:
        load_class(f"{tmp_path}/classes.py:{name}", key="k", methods=methods)
    assert mark.exists() == runs
