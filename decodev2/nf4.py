"""The NF4 codec: 16 levels, groups of 64 columns, one float16 scale per group, two codes per byte.

This is the only module that knows the levels, the groups and the nibble order. One matrix [M, K]:

    codes   uint8   [M, K_pad / 2]    low nibble = even column, high nibble = odd column
    scales  float16 [M, K_pad / 64]   max |w| of the group (1.0 when the group is all zero)

`K_pad` is K rounded up to a multiple of 64; the padding columns hold 0.0. A group never crosses a
row, so any K >= 1 packs and unpacks row by row. 4.25 bits per (padded) weight.

The module also holds the bfloat16 rounding used for everything that is not packed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from .errors import CodecError
from .plan import GROUP

_LEVEL_BITS = (
    0xBF800000, 0xBF3239B1, 0xBF066B30, 0xBECA32A0, 0xBE91A24D, 0xBE3D353F, 0xBDBA7871, 0x00000000,
    0x3DA2FAFF, 0x3E24CAE3, 0x3E7C04DD, 0x3EAD033A, 0x3EE1A4B8, 0x3F1007AB, 0x3F3913B3, 0x3F800000,
)  # fmt: skip
LEVELS = np.array(_LEVEL_BITS, dtype=np.uint32).view(np.float32)
LEVELS.setflags(write=False)
ZERO_CODE = 7

# Elements handled at a time: the float32 working copy (256 KiB) then stays in the L2 cache, and the
# memory needed beside the result does not grow with the matrix.
_ENCODE_CHUNK = 1 << 16
_DECODE_CHUNK = 1 << 18
_MATMUL_CHUNK = 1 << 22


def _thresholds() -> np.ndarray:
    """Smallest float32 that is strictly nearer to level i + 1 than to level i, for i = 0..14.

    "Nearer" is the codec's own rule: float32 squared distances, ties to the lower index. Between
    two levels one distance only grows and the other only shrinks (rounding is monotone), so there
    is one flip point and bisection over the ordered float32 values finds it exactly.
    """

    def order(x):  # float32 -> integers in the same order
        bits = x.view(np.int32).astype(np.int64)
        return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    def value(key):
        bits = np.where(key < 0, -key | 0x80000000, key)
        return bits.astype(np.uint32).view(np.float32)

    lower, upper = LEVELS[:-1], LEVELS[1:]
    low, high = order(lower), order(upper)  # invariant: low is nearer `lower`, high nearer `upper`
    while np.any(high - low > 1):
        middle = (low + high) // 2
        u = value(middle)
        is_upper = (u - upper) ** 2 < (u - lower) ** 2
        low, high = np.where(is_upper, low, middle), np.where(is_upper, middle, high)
    return value(high)


THRESHOLDS = _thresholds()
THRESHOLDS.setflags(write=False)


def _pair_table() -> np.ndarray:
    """Byte -> its two levels (even column first), as one uint64 so that a lookup moves both."""
    byte = np.arange(256)
    pairs = np.stack([LEVELS[byte & 15], LEVELS[byte >> 4]], axis=1)
    return np.ascontiguousarray(pairs).view(np.uint64)[:, 0]


_PAIRS = _pair_table()


@dataclass(frozen=True, eq=False)
class Packed:
    """One packed matrix. `shape` is the logical (M, K); codes uint8 [M, K_pad / 2], scales float16
    [M, K_pad / 64]. Raises CodecError when the three do not fit each other."""

    codes: np.ndarray
    scales: np.ndarray
    shape: tuple[int, int]

    def __post_init__(self):
        (m, k), k_pad = self.shape, padded(self.shape[1])
        for part, array, dtype, want in (
            ("codes", self.codes, np.uint8, (m, k_pad // 2)),
            ("scales", self.scales, np.float16, (m, k_pad // GROUP)),
        ):
            if array.dtype != dtype or array.shape != want:
                raise CodecError(
                    f"packed matrix {m} x {k}: {part} are {array.dtype} {list(array.shape)}, "
                    f"need {np.dtype(dtype)} {list(want)}"
                )

    @property
    def k_pad(self) -> int:
        return padded(self.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together."""
        return sum(packed_nbytes(self.shape))


def padded(k: int) -> int:
    """Columns after padding K up to whole groups."""
    return -(-k // GROUP) * GROUP


def packed_nbytes(shape: tuple[int, int]) -> tuple[int, int]:
    """(bytes of codes, bytes of scales) of a packed [M, K] matrix."""
    m, k = shape
    return m * padded(k) // 2, 2 * m * padded(k) // GROUP


# ---- encode ----


def encode_nf4(w, name: str = "matrix") -> Packed:
    """Pack a float matrix [M, K]; it is taken as float32.

    Works through a few rows at a time, so the memory needed beside input and result is small and
    constant. Raises CodecError, naming tensor, row and group, for NaN, an infinity, or a group
    whose largest value rounds to zero or past 65504 in float16.
    """
    w = np.asarray(w)
    if w.ndim != 2 or w.size == 0 or w.dtype.kind != "f":
        raise CodecError(
            f"{name}: {w.dtype} {list(w.shape)} cannot be packed; needs a float matrix [M, K], "
            "M and K at least 1"
        )
    m, k = w.shape
    k_pad = padded(k)
    codes = np.empty((m, k_pad // 2), dtype=np.uint8)
    scales = np.empty((m, k_pad // GROUP), dtype=np.float16)

    step = max(1, min(m, _ENCODE_CHUNK // k_pad))
    work = np.zeros((step, k_pad), dtype=np.float32)  # padding columns stay zero: 0 / scale
    index = np.empty((step, k_pad), dtype=np.uint8)
    above = np.empty((step, k_pad), dtype=bool)
    for start in range(0, m, step):
        n = min(step, m - start)
        rows, code, flag = work[:n], index[:n], above[:n]
        groups = rows.reshape(n, -1, GROUP)
        # A float64 past float32 becomes inf, which is refused; tiny quotients may become zero.
        with np.errstate(all="ignore"):
            rows[:, :k] = w[start : start + n]
            scale16 = _group_scales(groups, name, start)
            groups /= scale16.astype(np.float32)[:, :, None]
        scales[start : start + n] = scale16
        # Clipping to [-1, 1] is implied: everything past the last threshold has the last code.
        code[:] = 0
        for threshold in THRESHOLDS:
            np.greater_equal(rows, threshold, out=flag)
            code += flag.view(np.uint8)
        pairs = code.view("<u2")  # low byte: even column, high byte: odd column
        codes[start : start + n] = pairs | (pairs >> 4)  # the cast to uint8 keeps the low byte
    return Packed(codes, scales, (m, k))


def _group_scales(groups: np.ndarray, name: str, first_row: int) -> np.ndarray:
    """float16 scale of each group: float32 [n, G, 64] -> [n, G]."""
    largest = np.maximum(groups.max(axis=2), -groups.min(axis=2))  # NaN propagates through both
    scale16 = np.where(largest == 0, np.float32(1), largest).astype(np.float16)
    bad = ~(np.isfinite(scale16) & (scale16 > 0))
    if bad.any():
        row, group = (int(i) for i in np.argwhere(bad)[0])
        value = float(largest[row, group])
        where = f"{name}: row {first_row + row}, group {group} (columns from {group * GROUP})"
        if not np.isfinite(value):
            raise CodecError(f"{where} holds {value}; NF4 needs finite weights")
        raise CodecError(
            f"{where}: largest value {value:.9g} is {float(scale16[row, group])} in float16; "
            "a scale must be finite and above zero (about 3e-8 to 65504)"
        )
    return scale16


# ---- decode ----


def decode_nf4(packed: Packed, rows=None) -> np.ndarray:
    """Unpack to float32 [M, K], or only `rows` (a slice, or an integer array [n]) to [n, K].

    Every element is one float32 product: level times scale.
    """
    codes, scales = packed.codes, packed.scales
    if rows is not None:
        codes, scales = codes[rows], scales[rows]
    n, k = codes.shape[0], packed.shape[1]
    k_pad = packed.k_pad
    out = np.empty((n, k), dtype=np.float32)
    step = max(1, _DECODE_CHUNK // k_pad)
    for start in range(0, n, step):
        part = slice(start, start + step)
        levels = np.take(_PAIRS, codes[part]).view(np.float32).reshape(-1, k_pad // GROUP, GROUP)
        levels *= scales[part].astype(np.float32)[:, :, None]
        out[part] = levels.reshape(-1, k_pad)[:, :k]
    return out


def matmul_f32(packed: Packed, x: np.ndarray) -> np.ndarray:
    """Y = W_hat @ x in float32: packed [M, K] times x [K, N] -> [M, N].

    Unpacks a block of rows at a time. Raises CodecError when x has another number of rows than K.
    """
    m, k = packed.shape
    x = np.asarray(x, dtype=np.float32)
    if x.ndim != 2 or x.shape[0] != k:
        raise CodecError(f"packed matrix {m} x {k}: x is {list(x.shape)}, needs [{k}, N]")
    out = np.empty((m, x.shape[1]), dtype=np.float32)
    step = max(1, _MATMUL_CHUNK // packed.k_pad)
    for start in range(0, m, step):
        part = slice(start, min(m, start + step))
        np.matmul(decode_nf4(packed, part), x, out=out[part])
    return out


# ---- bfloat16 ----


def bf16_bits(x) -> np.ndarray:
    """float32 -> bfloat16 bit patterns (uint16, same shape), to nearest, ties to even.

    NaN stays NaN (made quiet); finite values past the largest bfloat16 become infinite.
    """
    x = np.ascontiguousarray(x, dtype=np.float32).reshape(np.shape(x))
    out = np.empty(x.shape, dtype=np.uint16)
    source, target = x.reshape(-1).view(np.uint32), out.reshape(-1)
    for start in range(0, source.size, _ENCODE_CHUNK):
        bits = source[start : start + _ENCODE_CHUNK]
        high = bits >> 16
        rounded = (bits + (0x7FFF + (high & 1))) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        target[start : start + _ENCODE_CHUNK] = np.where(is_nan, high | 0x40, rounded)
    return out


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bit patterns (uint16) -> float32 of the same shape, exactly."""
    return (np.asarray(bits, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


# ---- golden values ----

_GOLDEN = (
    "778788889999A9AAAABABBBBCBCCCCCCDDDDDDDDEDEEEEEEEEEEEEFEFFFFFFFF",
    "00001011111121222233434454556676878899AABABBCCCCDDDDEEEEEEFEFFFF",
)


def golden_rows() -> np.ndarray:
    """The two published golden rows, float32 [2, 64]: i / 63 and (2 i - 63) / 63."""
    i = np.arange(64, dtype=np.float32)
    return np.stack([i / np.float32(63), (2 * i - 63) / np.float32(63)])


def selfcheck() -> None:
    """Pack and unpack the golden rows of the format; RuntimeError when a byte or a bound is off."""
    if sys.byteorder != "little":
        raise RuntimeError("NF4 selfcheck: this machine is big-endian; needs a little-endian one")
    rows = golden_rows()
    packed = encode_nf4(rows, "golden")
    for row, want in enumerate(_GOLDEN):
        got = packed.codes[row].tobytes().hex().upper()
        if got != want:
            raise RuntimeError(f"NF4 selfcheck: golden row {row} packs to {got}, needs {want}")
    if packed.scales.view(np.uint16).tolist() != [[0x3C00], [0x3C00]]:
        raise RuntimeError(f"NF4 selfcheck: golden scales are {packed.scales.tolist()}, need 1.0")
    error = np.abs(decode_nf4(packed).astype(np.float64) - rows)
    for label, found, bound in (
        ("rmse", float(np.sqrt(np.mean(error**2))), 0.05185),
        ("max abs", float(error.max()), 0.14508),
        ("mean abs", float(error.mean()), 0.03980),
    ):
        if not found <= bound:
            raise RuntimeError(f"NF4 selfcheck: golden {label} is {found}, needs <= {bound}")
    short = encode_nf4(np.array([[0.0, 1.0]], dtype=np.float32), "golden K=2")
    if short.codes.tobytes().hex().upper() != "F7" + "77" * 31 or short.scales[0, 0] != 1.0:
        raise RuntimeError("NF4 selfcheck: [[0, 1]] does not pack to F7 and 31 times 77")
