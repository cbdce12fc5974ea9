import click
import pytest

from netkin.cli.options import as_bytes


@pytest.mark.parametrize(
    "text, size",
    [
        ("1000", 1000),
        ("500MB", 500_000_000),
        ("2GB", 2 * 10**9),
        ("2 gb", 2 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("1KiB", 1024),
    ],
)
def test_amounts_of_memory_are_read_as_people_write_them(text, size):
    assert as_bytes(text) == size


@pytest.mark.parametrize("text", ["much", "2XB", "-1GB", "", "GB", "1..2GB"])
def test_what_is_no_amount_is_refused(text):
    with pytest.raises(click.BadParameter, match="is no amount of memory; write one like 500MB"):
        as_bytes(text)


def test_no_memory_at_all_is_refused():
    with pytest.raises(click.BadParameter, match="'0GB' is no memory at all"):
        as_bytes("0GB")
