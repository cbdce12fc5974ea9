import pytest

from netkin.errors import ForwardError, SourceError
from netkin.sources import load_data, load_model


def test_characters_become_their_places_among_the_sorted_characters(tmp_path):
    (tmp_path / "a.txt").write_text("cabbage", encoding="utf-8")
    data = load_data(f"text,window=3:{tmp_path / 'a.txt'}")
    assert data.stored.tolist() == [[2, 0, 1], [1, 0, 4]]
    assert data.labels.tolist() == [[0, 1, 1], [0, 4, 3]]


def test_windows_hold_64_characters_by_default_and_the_rest_is_dropped(tmp_path):
    (tmp_path / "a.txt").write_text("äöü" * 100, encoding="utf-8")
    assert load_data(f"text:{tmp_path / 'a.txt'}").images.shape == (4, 64)


def test_a_text_too_short_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(SourceError, match="holds 5 characters; a window of 64 and the one after it need 65"):
        load_data(f"text:{tmp_path / 'a.txt'}")


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc\xff\xfe")
    with pytest.raises(SourceError, match="is no text in UTF-8: byte 3 fits no character"):
        load_data(f"text:{tmp_path / 'a.txt'}")


def test_a_text_feeds_the_character_network(tmp_path):
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question " * 4)
    characters, following = next(iter(load_data(f"text,window=16:{tmp_path / 'a.txt'}")))
    assert load_model("netkin:char_lstm,vocabulary=20")(characters).shape == (*following.shape, 20)


def test_a_text_with_more_characters_than_the_network_knows_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("".join(map(chr, range(1000, 1100))))
    characters, _ = next(iter(load_data(f"text:{tmp_path / 'a.txt'}")))
    with pytest.raises(ForwardError, match=r"character number 63 and this network knows 10.*char_lstm,vocabulary=64`"):
        load_model("netkin:char_lstm,vocabulary=10")(characters)


def test_the_real_shakespeare_has_65_characters(real_data):
    data = load_data(f"text:{real_data('shakespeare/input.txt')}/shakespeare/input.txt")
    assert data.stored.max() == 64
