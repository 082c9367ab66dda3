import pytest
from hypothesis import given
from hypothesis import strategies as st

from klamp.errors import ConfigError
from klamp.train import yamlfile

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("ab1e.:-# '\"\nβ→", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "given.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("3E+5", 3e5),
        ("-2e3", -2000.0),
        ("+1.5e-3", 0.0015),
        ("2.e1", 20.0),
        ("0.5", 0.5),
        (".5", 0.5),
    ],
)
def test_numbers_are_numbers_however_they_are_written(text, value):
    found = yamlfile.parse(text)
    assert isinstance(found, float) and found == value


@pytest.mark.parametrize("text", ["e4", "1e", "e", "1e-4x", "x1e4", "1e4.5", "- e3", "'1e4'"])
def test_words_stay_words(text):
    found = yamlfile.parse(text)
    assert (found[0] if isinstance(found, list) else found) == text.strip("- '").strip()


@pytest.mark.parametrize(
    ("text", "value"),
    [("12", 12), ("null", None), ("true", True), ("[1, a]", [1, "a"]), ("", None)],
)
def test_everything_else_is_as_in_yaml(text, value):
    found = yamlfile.parse(text)
    assert found == value and type(found) is type(value)


def test_an_empty_file_is_an_empty_mapping(file):
    assert yamlfile.read(file("")) == {}
    assert yamlfile.read(file("# nothing but a comment\n")) == {}


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("steps: 1\nseed: 2\nsteps: 3\n", "steps", 3),
        ("sampling:\n  prompts: 2\n  top_k: 3\n  prompts: 2\n", "prompts", 4),
        ("sampling: {prompts: 2,\n  prompts: 3}\n", "prompts", 2),
        ("stages:\n- {low: 1, high: 2}\n- {low: 1, low: 2}\n", "low", 3),
    ],
)
def test_a_key_given_twice_is_named_with_its_line(file, text, key, line):
    with pytest.raises(ConfigError, match=rf"'{key}' is given twice \(line {line}\)") as said:
        yamlfile.read(path := file(text))
    assert str(said.value).startswith(f"{path}: ")


def test_the_same_key_in_two_places_is_fine(file):
    assert yamlfile.read(file("a: {every: 1}\nb: {every: 2}\n")) == {
        "a": {"every": 1},
        "b": {"every": 2},
    }


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("steps: 3\n  x: 1\n", 2, 4),
        ("steps: 3\ntask:\n\tname: sort\n", 3, 1),
        ("a: 1\nb: *other\n", 2, 4),
        ("a: 1\n---\nb: 2\n", 2, 1),
        ("a: !!python/object:os.system x\n", 1, 4),
    ],
    ids=["indent", "tab", "alias", "two documents", "a tag that runs code"],
)
def test_bad_yaml_is_named_with_line_and_column(file, text, line, column):
    with pytest.raises(ConfigError, match=f"not valid YAML at line {line}, column {column}: ."):
        yamlfile.read(file(text))


@pytest.mark.parametrize(("text", "kind"), [("- 1\n", "list"), ("hello\n", "str"), ("3\n", "int")])
def test_a_file_that_is_no_mapping_is_refused(file, text, kind):
    with pytest.raises(ConfigError, match=f"holds a {kind}, wanted a mapping"):
        yamlfile.read(file(text))


def test_a_file_that_cannot_be_read_is_refused_with_the_reason(file, tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file or directory; give the path"):
        yamlfile.read(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        yamlfile.read(tmp_path)
    with pytest.raises(ConfigError, match="not a text file"):
        yamlfile.read(file(b"\xff\xfe\x00"))


@pytest.mark.parametrize("text", ["{[1]: 2}", "? {a: 1}\n: 2\n"])
def test_a_key_that_is_a_list_or_a_mapping_is_refused(text):
    with pytest.raises(ConfigError):
        yamlfile.parse(text)


def test_a_mapping_can_be_merged_into_another():
    text = "base: &base {prompts: 2, top_k: 3}\nsampling: {<<: *base, top_k: 4}\n"
    assert yamlfile.parse(text)["sampling"] == {"prompts": 2, "top_k": 4}


def test_an_equals_sign_is_text():
    assert yamlfile.parse("written: =") == {"written": "="}


def test_dump_keeps_the_order_and_writes_letters_as_they_are():
    assert yamlfile.dump({"steps": 1, "name": "β → 0", "a": None}) == (
        "steps: 1\nname: β → 0\na: null\n"
    )


@given(plain)
def test_what_is_dumped_is_read_back(value):
    assert yamlfile.parse(yamlfile.dump(value)) == value


def test_text_that_looks_like_a_number_is_read_back_as_text():
    assert yamlfile.parse(yamlfile.dump({"written": "1e4"})) == {"written": "1e4"}
