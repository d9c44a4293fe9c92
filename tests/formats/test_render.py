"""The reference renderer refuses images that the engine could not write."""

from __future__ import annotations

import zlib

import pytest
from datastates.engine.image import Checksum, Digest, FileImage, Literal
from datastates.formats.render import fold, render, validate


def test_checksums_and_digests_are_filled_in() -> None:
    image = FileImage(
        size=30,
        literals=[Literal(0, b"abc"), Literal(27, b"end")],
        checksums=[Checksum(3, 0, 3)],
        digests=[Digest(7, [(0, 3), (3, 7)])],
    )
    crc = zlib.crc32(b"abc")
    packed = crc.to_bytes(4, "little")
    assert render(image) == b"abc" + packed + fold([crc, zlib.crc32(packed)]) + b"end"


def test_a_digest_is_a_running_combination_in_64_bits() -> None:
    assert fold([]) == b"0" * 20
    assert fold([1]) == b"%020d" % (1 + 0x9E3779B9)
    assert len(fold([0xFFFFFFFF] * 40)) == 20


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        (FileImage(4, [Literal(1, b"abc")]), "gap at byte 0"),
        (FileImage(4, [Literal(0, b"abc"), Literal(2, b"xy")]), "overlap at byte 2"),
        (FileImage(5, [Literal(0, b"abc")]), "end at byte 3 of 5"),
        (FileImage(4, [Literal(2, b"ab"), Literal(0, b"ab")]), "not sorted"),
        (FileImage(3, [Literal(0, b""), Literal(0, b"abc")]), "empty part"),
        (FileImage(7, [Literal(4, b"abc")], checksums=[Checksum(0, 4, 7)]), "behind it"),
        (FileImage(23, [Literal(20, b"abc")], digests=[Digest(0, [(20, 23)])]), "behind it"),
    ],
)
def test_an_image_that_cannot_be_written_is_refused(image: FileImage, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        validate(image)
