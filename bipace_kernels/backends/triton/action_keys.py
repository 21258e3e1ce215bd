"""Action keys of token ids on a device, bit for bit those of reference/action_keys.py.

A program processes ROWS rows, TILE tokens of each at a time.  The text of a row is written into a ring of CAPACITY
bytes and searched or hashed as it passes, so rows and tokens of any length need the same small scratch memory,
which stays in the L1 cache.  A row is read up to three times:

    check  every valid id is in the table (else the row gets its first_n key, and `outside` its position)
    find   start and end of the body of the first <action>…</action>, without the white space at its ends
    hash   its bytes, lowered; or the first n valid ids if there is no such body
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from .. import triton_loader
from ..schema import Tokens
from ._launch import ceil_div, launch

FIRST_N, ACTION_TAG, TEXT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_MODES = {"first_n": 0, "action_tag": 1, "text": 2}
SEED_FIRST_N, SEED_ACTION_TAG, SEED_TEXT = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)

NOWHERE = tl.constexpr(1 << 62)  # beyond any position of a row
LESS_THAN, SLASH, BLANK = tl.constexpr(0x3C), tl.constexpr(0x2F), tl.constexpr(0x20)
NAME = tl.constexpr(int.from_bytes(b"action>", "little"))  # follows "<" or "</"
NAME_SIZE, OPEN_SIZE, CLOSE_SIZE = tl.constexpr(7), tl.constexpr(8), tl.constexpr(9)

# Primes and starts of the four accumulators (without the seed) of XXH64.
PRIME_1 = tl.constexpr(0x9E3779B185EBCA87)
PRIME_2 = tl.constexpr(0xC2B2AE3D27D4EB4F)
PRIME_3 = tl.constexpr(0x165667B19E3779F9)
PRIME_4 = tl.constexpr(0x85EBCA77C2B2AE63)
PRIME_5 = tl.constexpr(0x27D4EB2F165667C5)
START_1 = tl.constexpr((0x9E3779B185EBCA87 + 0xC2B2AE3D27D4EB4F) & ((1 << 64) - 1))
START_4 = tl.constexpr(-0x9E3779B185EBCA87 & ((1 << 64) - 1))


# One warp per row: nothing is reduced across warps, and rows of different lengths do not wait for each other.  64
# tokens are about 300 bytes of text; wider tiles or more columns cost registers (sm_90 spills at COLUMNS 8).  The ring
# holds a tile of ids (8 · TILE bytes), or new bytes plus at most 31 unfinished ones.
@dataclass(frozen=True)
class Cut:
    """How rows are split among programs, and their tile sizes; no key depends on it."""

    rows: int = 1  # of a program
    tile: int = 64  # tokens of a row
    columns: int = 4  # bytes of a token
    reach: int = 128  # bytes of text
    capacity: int = 2048  # bytes of a ring
    programs: int = 8192  # at most, each loops over further rows: more than any GPU runs at once; 16 MiB of rings


CUT = Cut()
# By default ptxas spills 8 to 16 bytes for flat ids on sm_90; with 128 registers it needs no stack for ids of
# any kind on sm_80, sm_90 and sm_100, with Triton 3.6 and 3.9.  Triton for AMD does not have the option.
_OPTIONS = {"num_warps": 1, "enable_fp_fusion": False, **({"maxnreg": 128} if torch.version.hip is None else {})}
INTERPRETED_ROWS = 256  # of a program: the interpreter's time depends on the number of operations, not on their size
LARGEST_TABLE = (2**31 - 1) // CUT.tile  # bytes: the text of a tile is measured in int32


@triton.jit
def rotate(x, BITS: tl.constexpr):
    return (x << BITS) | (x >> (64 - BITS))


@triton.jit
def add_lane(accumulator, word):
    return rotate(accumulator + word * PRIME_2, 31) * PRIME_1


@triton.jit
def merge(hash, accumulator):
    return (hash ^ (rotate(accumulator * PRIME_2, 31) * PRIME_1)) * PRIME_1 + PRIME_4


@triton.jit
def xxh_begin(SEED: tl.constexpr, LANES: tl.constexpr):
    """The four accumulators [LANES] before the first byte."""
    zero = tl.zeros([LANES], tl.uint64)
    return zero + START_1 + SEED, zero + PRIME_2 + SEED, zero + SEED, zero + START_4 + SEED


@triton.jit
def xxh_absorb(
    ring,  # [LANES] pointers to uint64, where each lane's ring starts
    a,
    b,
    c,
    d,
    absorbed,  # [LANES] int64 bytes taken so far, a multiple of 32
    available,  # [LANES] int64 bytes written so far
    CAPACITY: tl.constexpr,
):
    """Absorbs all whole stripes of 32 bytes; returns the accumulators and the number of absorbed bytes."""
    while tl.max(available - absorbed) >= 32:
        whole = available - absorbed >= 32
        stripe = ring + ((absorbed & (CAPACITY - 1)) >> 3)  # never wraps: 32 divides CAPACITY
        a = tl.where(whole, add_lane(a, tl.load(stripe, mask=whole, other=0)), a)
        b = tl.where(whole, add_lane(b, tl.load(stripe + 1, mask=whole, other=0)), b)
        c = tl.where(whole, add_lane(c, tl.load(stripe + 2, mask=whole, other=0)), c)
        d = tl.where(whole, add_lane(d, tl.load(stripe + 3, mask=whole, other=0)), d)
        absorbed = tl.where(whole, absorbed + 32, absorbed)
    return a, b, c, d, absorbed


@triton.jit
def xxh_finish(ring, a, b, c, d, absorbed, size, SEED: tl.constexpr, CAPACITY: tl.constexpr):
    """[LANES] uint64 hashes of strings of `size` [LANES] bytes, whose last 0 to 31 bytes are not yet absorbed."""
    short = tl.zeros_like(a) + PRIME_5 + SEED
    stripes = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18)
    stripes = merge(merge(merge(merge(stripes, a), b), c), d)
    hash = tl.where(size >= 32, stripes, short) + size.to(tl.uint64)
    word_at = ring + ((absorbed & (CAPACITY - 1)) >> 3)
    left = size - absorbed
    for k in tl.static_range(3):
        here = left >= 8 * (k + 1)
        word = tl.load(word_at + k, mask=here, other=0)
        with_word = rotate(hash ^ (rotate(word * PRIME_2, 31) * PRIME_1), 27) * PRIME_1 + PRIME_4
        hash = tl.where(here, with_word, hash)
    # The rest is in one word; the bytes above it do not belong to the string.
    rest = left & 7
    word = tl.load(word_at + (left >> 3), mask=rest > 0, other=0)
    half = rest >= 4
    with_half = rotate(hash ^ ((word & 0xFFFFFFFF) * PRIME_1), 23) * PRIME_2 + PRIME_3
    hash = tl.where(half, with_half, hash)
    word = tl.where(half, word >> 32, word)
    rest = tl.where(half, rest - 4, rest)
    for k in tl.static_range(3):
        byte = (word >> (8 * k)) & 0xFF
        hash = tl.where(rest > k, rotate(hash ^ (byte * PRIME_5), 11) * PRIME_1, hash)
    hash = (hash ^ (hash >> 33)) * PRIME_2
    hash = (hash ^ (hash >> 29)) * PRIME_3
    return hash ^ (hash >> 32)


@triton.jit
def _load_tokens(
    tokens,  # [ROWS] pointers to the first id of each row, to its first mask entry (or None), and the strides of both
    column,  # [ROWS] int64 first column of the tile
    size,  # [ROWS] int64 columns of the row
    TILE: tl.constexpr,
):
    """Ids [ROWS, TILE] int64 and which of them are valid tokens."""
    ids, valid, id_stride, valid_stride = tokens
    columns = column[:, None] + tl.arange(0, TILE)[None, :]
    is_valid = columns < size[:, None]
    token = tl.load(ids[:, None] + columns * id_stride, mask=is_valid, other=0).to(tl.int64)
    if valid is not None:
        is_valid &= tl.load(valid[:, None] + columns * valid_stride, mask=is_valid, other=0) != 0
    return token, is_valid


@triton.jit
def _spell(
    token,  # [ROWS, TILE] int64
    is_valid,  # [ROWS, TILE] bool; the valid ones are inside the table
    table_offsets,  # [V+1] int64
):
    """Where each token's bytes stand in the table (int64), where they start and end in the tile's text (int32)."""
    source = tl.load(table_offsets + token, mask=is_valid, other=0)
    length = (tl.load(table_offsets + token + 1, mask=is_valid, other=0) - source).to(tl.int32)
    end = tl.cumsum(length, 1)
    return source, end - length, end


@triton.jit
def _write_text(
    ring,  # [ROWS] pointers to bytes
    table_bytes,  # uint8
    source,  # [ROWS, TILE] as start and end by _spell
    start,
    end,
    low,  # [ROWS] int32: the bytes low ≤ p < high of the tile's text are written …
    high,
    target,  # [ROWS] int64: … to target, target + 1, … (mod CAPACITY)
    LOWER: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    first = tl.maximum(start, low[:, None])
    count = tl.minimum(end, high[:, None]) - first
    source = table_bytes + (source + (first - start))
    place = (target & (CAPACITY - 1)).to(tl.int32)[:, None] + (first - low[:, None])
    for done in range(0, tl.max(count), COLUMNS):
        k = done + tl.arange(0, COLUMNS)[None, None, :]
        here = k < count[:, :, None]
        byte = tl.load(source[:, :, None] + k, mask=here, other=0)
        if LOWER:
            byte = tl.where((byte >= 0x41) & (byte <= 0x5A), byte | 0x20, byte)
        tl.store(ring[:, None, None] + ((place[:, :, None] + k) & (CAPACITY - 1)), byte, mask=here)


@triton.jit
def _within(position, at, most):
    """A text position as one relative to `at`, clamped to [0, most]: [ROWS, 1] int32."""
    return tl.minimum(tl.maximum(position - at, 0), most).to(tl.int32)[:, None]


@triton.jit
def _first(condition, k, at, most):
    """Text position of the first k where the condition holds, [ROWS] int64; NOWHERE if there is none."""
    lowest = tl.min(tl.where(condition, k, most), 1)
    return tl.where(lowest < most, at + lowest, NOWHERE)


@triton.jit
def _search(
    ring,  # [ROWS] pointers to bytes
    at,  # [ROWS] int64: the text positions at ≤ p < limit are searched, each for the first time
    limit,
    body,  # [ROWS] int64, NOWHERE until found: first byte of the body
    close,  # first byte of the closing tag
    head,  # first byte of the body that is not white space
    tail,  # one past the last such byte, 0 until found
    TAG: tl.constexpr,
    REACH: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """body, close, head and tail, brought up to date."""
    while tl.max(limit - at) > 0:
        k = tl.arange(0, REACH)[None, :]
        place = (at & (CAPACITY - 1)).to(tl.int32)[:, None] + k
        here = k < _within(limit, at, REACH)
        byte = tl.load(ring[:, None] + (place & (CAPACITY - 1)), mask=here, other=0x20)
        tag = here & (byte == LESS_THAN)
        if TAG and tl.max(tag.to(tl.int32)) > 0:  # most of a text has none
            slash = tl.load(ring[:, None] + ((place + 1) & (CAPACITY - 1)), mask=tag, other=0) == SLASH
            name = place + 1 + slash.to(tl.int32)
            for i in tl.static_range(NAME_SIZE):
                letter = tl.load(ring[:, None] + ((name + i) & (CAPACITY - 1)), mask=tag, other=0)
                tag &= letter == ((NAME >> (8 * i)) & 0xFF)
            body = tl.minimum(body, _first(tag & ~slash, k, at, REACH) + OPEN_SIZE)
            close = tl.minimum(close, _first(tag & slash & (k >= _within(body, at, REACH)), k, at, REACH))
        if tl.min(body) < NOWHERE:
            blank = (byte == BLANK) | ((byte >= 0x09) & (byte <= 0x0D))
            solid = here & ~blank & (k >= _within(body, at, REACH)) & (k < _within(close, at, REACH))
            head = tl.minimum(head, _first(solid, k, at, REACH))
            last = tl.max(tl.where(solid, k + 1, 0), 1)
            tail = tl.where(last > 0, at + last, tail)
        at += REACH
    return body, close, head, tail


@triton.jit
def _find(
    tokens,  # as in _load_tokens
    size,
    table_offsets,
    table_bytes,
    ring,  # [ROWS] pointers to bytes
    TAG: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    REACH: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """The body's text [head, tail) without white space at its ends, and a tile that starts at or before it.

    Returns is_parsed [ROWS] bool, head, tail (equal where it is empty), and the tile's column and text position.
    """
    zero = tl.zeros_like(size)
    nowhere = zero + NOWHERE
    column, position, looked, tail = zero, zero, zero, zero
    body, close, head = nowhere, nowhere, nowhere
    body_column, body_position = zero, zero
    if not TAG:
        body = zero
    while tl.max(tl.where(close == NOWHERE, size - column, 0)) > 0:
        todo = tl.where(close == NOWHERE, size, 0)
        token, is_valid = _load_tokens(tokens, column, todo, TILE)
        source, start, end = _spell(token, is_valid, table_offsets)
        stop = tl.max(end, 1)
        unopened = body >= NOWHERE
        low = tl.zeros_like(stop)
        while tl.max(stop - low) > 0:  # once, but for tiles of very long tokens
            high = tl.minimum(stop, low + (CAPACITY - 32))
            _write_text(ring, table_bytes, source, start, end, low, high, position + low, False, COLUMNS, CAPACITY)
            tl.debug_barrier()
            # A tag is only searched where it would be complete: the last eight bytes wait for the next round.
            limit = position + high - (CLOSE_SIZE - 1) if TAG else position + high
            body, close, head, tail = _search(ring, looked, limit, body, close, head, tail, TAG, REACH, CAPACITY)
            looked = tl.maximum(looked, limit)
            tl.debug_barrier()
            low = high
        here = unopened & (body < NOWHERE)
        body_column = tl.where(here, column, body_column)
        body_position = tl.where(here, position, body_position)
        position += stop
        column += TILE
    is_parsed = close < NOWHERE if TAG else tail > 0
    solid = is_parsed & (tail > 0)
    return is_parsed, tl.where(solid, head, 0), tl.where(solid, tail, 0), body_column, body_position


@triton.jit
def _hash_text(
    tokens,  # as in _load_tokens
    size,
    table_offsets,
    table_bytes,
    ring,  # [ROWS] pointers to bytes
    head,  # as the rest by _find
    tail,
    column,
    position,
    SEED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """[ROWS] uint64 hashes of the text [head, tail), A–Z lowered."""
    words = ring.to(tl.pointer_type(tl.uint64))
    a, b, c, d = xxh_begin(SEED, ROWS)
    absorbed = tl.zeros_like(size)
    while tl.max(tail - position) > 0:
        todo = tl.where(position < tail, size, 0)
        token, is_valid = _load_tokens(tokens, column, todo, TILE)
        source, start, end = _spell(token, is_valid, table_offsets)
        length = tl.max(end, 1)
        low = tl.minimum(tl.maximum(head - position, 0), length).to(tl.int32)
        stop = tl.minimum(tl.maximum(tail - position, 0), length).to(tl.int32)
        while tl.max(stop - low) > 0:
            high = tl.minimum(stop, low + (CAPACITY - 32))
            _write_text(
                ring, table_bytes, source, start, end, low, high, position + low - head, True, COLUMNS, CAPACITY
            )
            tl.debug_barrier()
            written = tl.minimum(position + high, tail) - head  # a finished row is beyond its tail
            a, b, c, d, absorbed = xxh_absorb(words, a, b, c, d, absorbed, written, CAPACITY)
            tl.debug_barrier()
            low = high
        position += length
        column += TILE
    hash = xxh_finish(words, a, b, c, d, absorbed, tail - head, SEED, CAPACITY)
    tl.debug_barrier()
    return hash


@triton.jit
def _hash_first_ids(tokens, size, n, ring, ROWS: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr):
    """[ROWS] uint64 hashes of the first n valid ids of each row as little-endian int64."""
    words = ring.to(tl.pointer_type(tl.uint64))
    a, b, c, d = xxh_begin(SEED_FIRST_N, ROWS)
    column, taken, absorbed = tl.zeros_like(size), tl.zeros_like(size), tl.zeros_like(size)
    while tl.max(tl.where(taken < n, size - column, 0)) > 0:
        todo = tl.where(taken < n, size, 0)
        token, is_valid = _load_tokens(tokens, column, todo, TILE)
        count = is_valid.to(tl.int64)
        rank = taken[:, None] + tl.cumsum(count, 1) - 1
        tl.store(words[:, None] + (rank & (CAPACITY // 8 - 1)), token.to(tl.uint64), mask=is_valid & (rank < n))
        taken = tl.minimum(taken + tl.sum(count, 1), n)
        tl.debug_barrier()
        a, b, c, d, absorbed = xxh_absorb(words, a, b, c, d, absorbed, 8 * taken, CAPACITY)
        tl.debug_barrier()
        column += TILE
    hash = xxh_finish(words, a, b, c, d, absorbed, 8 * taken, SEED_FIRST_N, CAPACITY)
    tl.debug_barrier()
    return hash


@triton.jit(do_not_specialize=["n_rows", "n_columns", "longest_row", "vocabulary", "n"])
def key_kernel(
    ids,  # any integer dtype: [N, T], or flat with row_offsets
    valid,  # like ids, non-zero = valid; None: all are
    row_offsets,  # [N+1] int64, or None
    table_offsets,  # [V+1] int64; None for FIRST_N, as table_bytes
    table_bytes,  # uint8
    rings,  # scratch: int64, CAPACITY bytes for each row in flight
    keys,  # [N] int64
    parsed,  # [N] bool
    outside,  # [1] int64, −1 before: lowest flat position of a valid id outside the table
    n_rows,
    n_columns,
    longest_row,  # columns of the longest row
    vocabulary,
    n,
    id_row_stride,
    id_column_stride,
    valid_row_stride,
    valid_column_stride,
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    REACH: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    ring = rings.to(tl.pointer_type(tl.uint8)) + (program * ROWS + tl.arange(0, ROWS)) * CAPACITY
    for block in range(program, tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        is_row = row < n_rows
        if row_offsets is not None:
            place = tl.load(row_offsets + row, mask=is_row, other=0)
            size = tl.load(row_offsets + row + 1, mask=is_row, other=0) - place
            id_row, valid_row = ids + place * id_column_stride, valid
            if valid is not None:
                valid_row = valid + place * valid_column_stride
        else:
            place = row * n_columns
            size = tl.where(is_row, tl.cast(n_columns, tl.int64), 0)
            id_row, valid_row = ids + row * id_row_stride, valid
            if valid is not None:
                valid_row = valid + row * valid_row_stride
        tokens = (id_row, valid_row, id_column_stride, valid_column_stride)

        is_parsed = row < 0
        key = tl.zeros_like(row).to(tl.uint64)
        if MODE != FIRST_N:
            bad = tl.zeros_like(row) + NOWHERE  # lowest column of an id outside the table
            for begin in range(0, longest_row, 4 * TILE):
                column = tl.zeros_like(row) + begin
                token, is_valid = _load_tokens(tokens, column, size, 4 * TILE)
                columns = column[:, None] + tl.arange(0, 4 * TILE)[None, :]
                is_bad = is_valid & ((token < 0) | (token >= vocabulary))
                bad = tl.minimum(bad, tl.min(tl.where(is_bad, columns, NOWHERE), 1))
            lowest = tl.min(tl.where(bad < NOWHERE, place + bad, NOWHERE))
            if lowest < NOWHERE:  # minimum as unsigned numbers, where −1 is the largest
                tl.atomic_min(outside.to(tl.pointer_type(tl.uint64)), lowest.to(tl.uint64), sem="relaxed")

            sound = tl.where(bad < NOWHERE, 0, size)
            is_parsed, head, tail, column, position = _find(
                tokens, sound, table_offsets, table_bytes, ring, MODE == ACTION_TAG, TILE, COLUMNS, REACH, CAPACITY
            )
            key = _hash_text(
                tokens, sound, table_offsets, table_bytes, ring, head, tail, column, position,
                SEED_ACTION_TAG if MODE == ACTION_TAG else SEED_TEXT, ROWS, TILE, COLUMNS, CAPACITY,
            )  # fmt: skip
        # Text of only white space has the key of zero bytes, and is not parsed.
        by_ids = bad < NOWHERE if MODE == TEXT else ~is_parsed
        first = _hash_first_ids(tokens, tl.where(by_ids, size, 0), n, ring, ROWS, TILE, CAPACITY)
        key = tl.where(by_ids, first, key)
        tl.store(keys + row, key.to(tl.int64, bitcast=True), mask=is_row)
        tl.store(parsed + row, is_parsed, mask=is_row)


def hash_token_ids(
    tokens: Tokens, mode: str, n: int, cut: Cut | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """cut: None: the default for GPUs, and programs of many rows in the interpreter."""
    ids, row_offsets, valid, table_offsets, table_bytes, longest_row = tokens
    flat, n_rows = row_offsets is not None, tokens.n_rows
    keys = torch.empty(n_rows, dtype=torch.int64, device=ids.device)
    parsed = torch.empty(n_rows, dtype=torch.bool, device=ids.device)
    outside = torch.full((1,), -1, dtype=torch.int64, device=ids.device)
    if n_rows == 0:
        return keys, parsed, outside
    if valid is not None and valid.dtype == torch.bool:
        valid = valid.view(torch.uint8)
    if cut is None:
        many = triton_loader.interpreted()
        cut = replace(CUT, rows=min(INTERPRETED_ROWS, triton.next_power_of_2(n_rows))) if many else CUT
    programs = min(ceil_div(n_rows, cut.rows), cut.programs)
    rings = torch.empty(programs * cut.rows * cut.capacity // 8, dtype=torch.int64, device=ids.device)
    mask = ids if valid is None else valid
    launch(
        key_kernel, (programs,), ids, valid, row_offsets, table_offsets, table_bytes, rings, keys, parsed, outside,
        n_rows, 0 if flat else ids.shape[1], longest_row, tokens.vocabulary, n,
        0 if flat else ids.stride(0), ids.stride(-1), 0 if flat else mask.stride(0), mask.stride(-1),
        MODE=_MODES[mode], ROWS=cut.rows, TILE=cut.tile, COLUMNS=cut.columns, REACH=cut.reach, CAPACITY=cut.capacity,
        **_OPTIONS,
    )  # fmt: skip
    return keys, parsed, outside
