import pytest
from tokenizers import Tokenizer

from dsa_compile.errors import UserError
from dsa_compile.measure.eval.texts import Window, cut_windows, read_texts, spread


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def test_windows_share_nothing_and_miss_nothing(tokenizer):
    text = "abcdefghij"
    windows = cut_windows(text, tokenizer, context=5, lead=[0])
    assert [len(w.ids) for w in windows] == [5, 5, 3]
    assert all(w.ids[0] == 0 for w in windows)
    assert tokenizer.decode([i for w in windows for i in w.ids]) == text
    assert [w.num_bytes for w in windows] == [4, 4, 2]


def test_without_a_begin_token_the_first_token_is_not_predicted(tokenizer):
    windows = cut_windows("abcdefghi", tokenizer, context=4, lead=[])
    # the ninth byte alone would predict nothing
    assert [(len(w.ids), w.num_bytes) for w in windows] == [(4, 3), (4, 3)]


def test_bytes_are_those_of_utf8(tokenizer):
    (window,) = cut_windows("aé€", tokenizer, context=16, lead=[0])
    assert window.num_bytes == 6 == len(window.ids) - 1


def test_spreading_takes_from_all_parts():
    windows = [Window([i] * 10, 10) for i in range(10)]
    assert [w.ids[0] for w in spread(windows, 30)] == [0, 4, 9]
    assert spread(windows, 1000) == windows
    assert len(spread(windows, 1)) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty; give text"),
        (b" \n\t\n", "empty; give text"),
        (b"abc\xff\xfe", r"not UTF-8 text \(byte 3\)"),
        (b"abc\0def", "NUL bytes"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, content, message):
    path = tmp_path / "text"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_texts([path])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.txt: cannot be read \(No such file"):
        read_texts([tmp_path / "nowhere.txt"])
