"""Sizes: what people write, what is printed, and that one reads the other back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.sizes import format_bytes, format_count, parse_bytes, parse_count, whole


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("44GB", 44 * 10**9),
        ("44 GiB", 44 * 2**30),
        ("44gib", 44 * 2**30),
        ("1.5 kB", 1500),
        ("0.5KiB", 512),
        ("5e8", 5 * 10**8),
        ("1_000", 1000),
        ("7", 7),
        (5e8, 5 * 10**8),
        ("12B", 12),
        ("2T", 2 * 10**12),
    ],
)
def test_bytes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "count"),
    [("8B", 8 * 10**9), ("8b", 8 * 10**9), ("1.3B", 13 * 10**8), (8e9, 8 * 10**9), ("350M", 35 * 10**7)],
)
def test_counts(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("reader", [whole, parse_bytes, parse_count])
@pytest.mark.parametrize(
    "value",
    [
        -1,
        "-1",
        0.5,
        "0.3",
        float("nan"),
        float("inf"),
        True,
        None,
        "",
        "GB",
        "1e999",
        "9" * 70,
        1e300,
        10**400,
        [],
        "1 2",
        "4 furlongs",
        "1e",
        "٣",
    ],
)
def test_bad_sizes_are_value_errors(reader, value):
    with pytest.raises(ValueError, match="expected a"):
        reader(value)


def test_a_fraction_of_a_byte_is_an_error_and_of_a_unit_is_not():
    assert parse_bytes("0.001kB") == 1
    with pytest.raises(ValueError, match="not a fraction"):
        parse_bytes("0.0001kB")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1KiB"),
        (16_250_000_000, "16.25GB"),
        (47_244_640_256, "44GiB"),
        (53_333_333_333, "53.3GB"),
        (999_900_001, "1GB"),
        (10**15, "1PB"),
        (25.6e9, "25.6GB"),
    ],
)
def test_printed_as_written(size, text):
    assert format_bytes(size) == text


@given(st.integers(1, 9999), st.sampled_from(["B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]))
def test_bytes_with_a_unit_are_printed_in_full(number, unit):
    size = parse_bytes(f"{number}{unit}")
    assert parse_bytes(format_bytes(size)) == size


@given(st.integers(1, 9999), st.sampled_from(["", "k", "M", "B", "T"]))
def test_counts_with_a_unit_are_printed_in_full(number, unit):
    count = parse_count(f"{number}{unit}")
    assert parse_count(format_count(count)) == count


@given(st.integers(0, 2**62))
def test_any_size_prints_within_half_a_percent(size):
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.005)
    assert parse_count(format_count(size)) == pytest.approx(size, rel=0.005)
