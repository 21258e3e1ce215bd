"""XXH64 in plain Python, after the published description of the algorithm (xxHash specification, version 0.1.1)."""

PRIME_1 = 0x9E3779B185EBCA87
PRIME_2 = 0xC2B2AE3D27D4EB4F
PRIME_3 = 0x165667B19E3779F9
PRIME_4 = 0x85EBCA77C2B2AE63
PRIME_5 = 0x27D4EB2F165667C5
MASK = 0xFFFFFFFFFFFFFFFF


def _rotate(x: int, bits: int) -> int:
    return ((x << bits) | (x >> (64 - bits))) & MASK


def _round(accumulator: int, lane: int) -> int:
    return _rotate((accumulator + lane * PRIME_2) & MASK, 31) * PRIME_1 & MASK


def _little_endian(data: bytes) -> int:
    return int.from_bytes(data, "little")


def xxh64(data: bytes, seed: int = 0) -> int:
    """The hash as an unsigned 64-bit int."""
    at = 0
    if len(data) >= 32:
        lanes = [(seed + PRIME_1 + PRIME_2) & MASK, (seed + PRIME_2) & MASK, seed, (seed - PRIME_1) & MASK]
        while at + 32 <= len(data):
            for i in range(4):
                lanes[i] = _round(lanes[i], _little_endian(data[at + 8 * i : at + 8 * i + 8]))
            at += 32
        value = sum(_rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & MASK
        for lane in lanes:
            value = ((value ^ _round(0, lane)) * PRIME_1 + PRIME_4) & MASK
    else:
        value = (seed + PRIME_5) & MASK
    value = (value + len(data)) & MASK
    while at + 8 <= len(data):
        value = (_rotate(value ^ _round(0, _little_endian(data[at : at + 8])), 27) * PRIME_1 + PRIME_4) & MASK
        at += 8
    if at + 4 <= len(data):
        word = _little_endian(data[at : at + 4]) * PRIME_1 & MASK
        value = (_rotate(value ^ word, 23) * PRIME_2 + PRIME_3) & MASK
        at += 4
    for byte in data[at:]:
        value = _rotate(value ^ (byte * PRIME_5 & MASK), 11) * PRIME_1 & MASK
    value = (value ^ (value >> 33)) * PRIME_2 & MASK
    value = (value ^ (value >> 29)) * PRIME_3 & MASK
    return value ^ (value >> 32)


def signed(value: int) -> int:
    """The same 64 bits read as int64."""
    return value - (1 << 64) if value >= 1 << 63 else value
