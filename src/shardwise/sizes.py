"""Sizes as text: 44GB is 44e9 bytes, 44GiB is 44 x 2^30 bytes, 8B is 8e9 parameters.

Configurations, the command line and reports all use these functions, so that a text has one meaning everywhere.
Arithmetic is exact (no floats): a size that is printed in full reads back as the same number.
"""

import math
import re
from collections.abc import Mapping
from decimal import Decimal

_DECIMAL = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_COUNT = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

_COUNT_UNITS = {name.lower(): size for name, size in _COUNT.items()} | {"g": 10**9}
_BYTE_UNITS = _COUNT_UNITS | {name.lower(): size for name, size in (_DECIMAL | _BINARY).items()}

_NUMBER = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*([A-Za-z]*)\s*", re.ASCII)
_LARGEST = 2**63  # larger than any memory or model, and slow to handle as an exact integer


def whole(value: object) -> int:
    """The whole number >= 0 that `value` spells: 500000000, 5e8 and "5e8" are the same.

    >>> whole(5e8)
    500000000
    """
    return _read(value, {"": 1}, "a whole number such as 500000000 or 5e8")


def parse_bytes(value: object) -> int:
    """Bytes from a number or a text with a unit (B, kB, MB, GB, TB, PB; KiB, MiB, GiB, TiB, PiB).

    >>> parse_bytes("44GB"), parse_bytes("44GiB")
    (44000000000, 47244640256)
    """
    return _read(value, _BYTE_UNITS, "a size such as 44GB, 44GiB or a number of bytes")


def parse_count(value: object) -> int:
    """A number of parameters or elements from a number or a text with k, M, B or T (thousand to 1e12).

    >>> parse_count("8B"), parse_count("1.5M"), parse_count(8e9)
    (8000000000, 1500000, 8000000000)
    """
    return _read(value, _COUNT_UNITS, "a count such as 8B, 350M, 8e9 or a whole number")


def format_bytes(n: int | float) -> str:
    """The shortest text that reads back as `n`, or three significant digits where none is short.

    >>> format_bytes(44 * 10**9), format_bytes(44 * 2**30), format_bytes(51_234_567_890)
    ('44GB', '44GiB', '51.2GB')
    """
    return _format(n, _DECIMAL, _BINARY)


def format_count(n: int | float) -> str:
    """The shortest text that `parse_count` reads back as `n`, or three significant digits where none is short.

    >>> format_count(8_000_000_000), format_count(134_515_008)
    ('8B', '135M')
    """
    return _format(n, _COUNT, {})


def three_digits(value: float) -> str:
    """A number in at most three significant digits, or all digits before the point.

    >>> three_digits(0.12345), three_digits(1234.6)
    ('0.123', '1235')
    """
    return f"{value:.0f}" if value >= 99.5 else f"{value:.3g}"


def _read(value: object, units: Mapping[str, int], allowed: str) -> int:
    number, unit = _split(value, allowed)
    factor = units.get(unit.lower())
    if factor is None:
        known = ", ".join(sorted(name for name in units if name))
        raise ValueError(f"expected {allowed}" + (f"; {unit!r} is none of the units {known}" if known else ""))
    total = number * factor
    if total < 0:
        raise ValueError(f"expected {allowed}, not a negative one")
    if total > _LARGEST:
        raise ValueError(f"expected {allowed}, smaller than 2^63")
    if total != total.to_integral_value():
        raise ValueError(f"expected {allowed}, not a fraction")
    return int(total)


def _split(value: object, allowed: str) -> tuple[Decimal, str]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"expected {allowed}, a finite one")
        return Decimal(value), ""
    match = _NUMBER.fullmatch(value) if isinstance(value, str) and len(value) < 64 else None
    if match is None:
        raise ValueError(f"expected {allowed}")
    return Decimal(match[1]), match[2]


def _format(n: int | float, decimal: Mapping[str, int], binary: Mapping[str, int]) -> str:
    exact = [text for unit, size in {**decimal, **binary}.items() if (text := _exact(n, unit, size))]
    if exact:
        return min(exact, key=len)  # the first of equals: a decimal unit before a binary one
    unit, size = [item for item in decimal.items() if item[1] <= max(abs(n), 1)][-1]
    if abs(n) / size >= 999.5 and size < max(decimal.values()):  # 999.9MB rounds up to the next unit
        unit, size = next(item for item in decimal.items() if item[1] > size)
    return f"{float(f'{n / size:.3g}'):g}{unit}"


def _exact(n: int | float, unit: str, size: int) -> str | None:
    """`n` in `unit` if two decimals suffice and it is at least one unit."""
    hundredths, rest = divmod(n * 100, size)
    if rest or (size > 1 and abs(n) < size) or abs(n) >= size * 10_000:
        return None
    return f"{Decimal(int(hundredths)) / 100:f}{unit}"
