"""Checks of NumPy and CuPy arrays with their error messages, and the memory that an array's elements occupy.

A kind is ``"cpu"`` (numpy.ndarray) or ``"gpu"`` (cupy.ndarray). CuPy is never imported here: a process that passes a
CuPy array has already imported it.
"""

from __future__ import annotations

import ctypes
import operator
import sys
from collections.abc import Iterable, Sequence
from typing import Any, cast

import ml_dtypes
import numpy as np

Array = Any  # numpy.ndarray or cupy.ndarray; CuPy has no type annotations

#: The supported dtypes by name. bfloat16 is recognised by comparing dtypes, never by ``dtype.kind``.
DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
#: Kernels take sizes as signed 64-bit integers.
LARGEST_SIZE = 2**63 - 1
#: Maximum length of a value's text in an error message, characters.
LONGEST_WORDS = 80
NAMES: dict[np.dtype[Any], str] = {dtype: name for name, dtype in DTYPES.items()}


def kind_of(name: str, array: object) -> str:
    """The kind of an array: ``"cpu"`` or ``"gpu"``.

    Raises
    ------
    TypeError
        If it is not an array of either kind; the message says how to make one. A masked array is rejected because
        kernels ignore masks.
    """
    if isinstance(array, np.ndarray):
        if isinstance(array, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):
            raise TypeError(
                f"{name}: a numpy.ma.MaskedArray, expected an array without a mask, which kernels ignore; "
                f"pass {name}.filled(value), or {name}.data to include the masked elements"
            )
        return "cpu"
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        return "gpu"
    came = f"{type(array).__module__.partition('.')[0]}.{type(array).__name__}".removeprefix("builtins.")
    advice = f"; use {_importer(array)}.from_dlpack({name})" if hasattr(array, "__dlpack__") else ""
    raise TypeError(f"{name}: {came}, expected a cupy.ndarray or a numpy.ndarray{advice}")


def _importer(array: Any) -> str:
    """The module that imports an array of another library by DLPack: numpy for one in host memory."""
    try:
        device, _ = array.__dlpack_device__()
    except Exception:  # another library's code, for a message only
        return "cupy"
    return "numpy" if device == 1 else "cupy"  # kDLCPU of dlpack.h


def namespace(kind: str) -> Any:
    """The array module of a kind: numpy or cupy."""
    return np if kind == "cpu" else sys.modules["cupy"]


def place_of(array: Array) -> tuple[str, int]:
    """The kind of an array and the ordinal of its GPU (0 for numpy)."""
    return ("cpu", 0) if isinstance(array, np.ndarray) else ("gpu", int(array.data.device_id))


def same_place(arrays: Iterable[tuple[str, Array | None]]) -> tuple[str, int]:
    """The place (kind and GPU ordinal) of all of these arrays; None entries are skipped.

    Raises
    ------
    TypeError
        If an argument is not an array, or NumPy and CuPy arrays are mixed.
    ValueError
        If the arrays are on different GPUs.
    """
    first: tuple[str, tuple[str, int]] | None = None
    for name, array in arrays:
        if array is None:
            continue
        kind_of(name, array)
        place = place_of(array)
        if first is None:
            first = name, place
        elif place[0] != first[1][0]:
            kinds = {"cpu": "numpy.ndarray", "gpu": "cupy.ndarray"}
            raise TypeError(f"{name}: a {kinds[place[0]]}, but {first[0]} is a {kinds[first[1][0]]}; expected one kind")
        elif place != first[1]:
            raise ValueError(f"{name}: on GPU {place[1]}, but {first[0]} is on GPU {first[1][1]}; expected one GPU")
    assert first is not None
    return first[1]


def dtype_name(name: str, array: Array, allowed: Sequence[str] = tuple(DTYPES), why: str = "") -> str:
    """The name of an array's dtype.

    Raises
    ------
    TypeError
        If the dtype is not allowed.
    """
    found = NAMES.get(array.dtype)
    if found is None or found not in allowed:
        came = found or str(array.dtype)
        raise TypeError(f"{name}: dtype {came}, expected {' or '.join(dict.fromkeys(allowed))}{why}")
    return found


def dtype_named(name: str, value: object, allowed: Sequence[str] = tuple(DTYPES)) -> str:
    """The name of a dtype, from its name or its dtype object (TypeError)."""
    try:
        dtype = DTYPES[value] if isinstance(value, str) and value in DTYPES else np.dtype(value)  # type: ignore[call-overload]
        found = "" if value is None else NAMES.get(dtype) or str(dtype)  # numpy.dtype(None) is float64
    except (TypeError, ValueError, SyntaxError):  # numpy.dtype("f,,") is a SyntaxError
        found = ""
    if found not in allowed or isinstance(value, (np.ndarray, np.generic)):
        raise TypeError(f"{name}: {said(value)}, expected {' or '.join(dict.fromkeys(allowed))}")
    return found


def one_dtype(first: tuple[str, Array], second: tuple[str, Array]) -> None:
    """Check that two arrays have the same dtype (TypeError)."""
    if first[1].dtype != second[1].dtype:
        raise TypeError(f"{second[0]}: dtype {second[1].dtype}, expected {first[1].dtype}, the dtype of {first[0]}")


def shape_of(name: str, array: Array, expected: tuple[int, ...], why: str = "") -> None:
    """Check an array's shape (ValueError)."""
    if array.shape != expected:
        raise ValueError(f"{name}: shape {array.shape}, expected {expected}{why}")


def sized(name: str, array: Array, size: int, expected: str) -> None:
    """Check an array's number of elements (ValueError)."""
    if array.size != size:
        raise ValueError(f"{name}: shape {array.shape}, expected {expected}")


def is_array(value: object) -> bool:
    """Whether a value is an array of any library; a NumPy scalar is not, nor the class of one."""
    return hasattr(value, "ndim") and not isinstance(value, (np.generic, type))


def said(value: object) -> str:
    """The text of a wrong value in an error message.

    For an array it is only the type's name: to print an array on a GPU, the process would have to wait for the GPU.
    """
    if is_array(value):
        return type(value).__name__
    try:
        words = repr(value)
    except Exception:  # for example an int with more digits than Python prints
        return f"an unprintable {type(value).__name__}"
    return words if len(words) <= LONGEST_WORDS else f"{words[:LONGEST_WORDS]}..."


def integer(name: str, value: object, least: int = 1) -> int:
    """A value as an int from ``least`` to 2**63 - 1, the largest size that kernels take; bool is rejected."""
    try:
        number = operator.index(None if isinstance(value, (bool, np.bool_)) else value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: {said(value)}, expected an int") from None
    if number < least:
        raise ValueError(f"{name}: {said(number)}, expected at least {least}")
    if number > LARGEST_SIZE:
        raise ValueError(f"{name}: {said(number)}, expected at most 2**63 - 1")
    return number


def number(name: str, value: object) -> float:
    """A value as a float, infinity if it is too large for one. bool, text and arrays are rejected.

    To read an array on a GPU, the process would have to wait for the GPU.
    """
    if is_array(value) or isinstance(value, (bool, np.bool_, str, bytes, bytearray)):
        raise TypeError(f"{name}: {said(value)}, expected a number")
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"{name}: {said(value)}, expected a number") from None
    except OverflowError:
        return float("inf")


#: Smallest magnitude above 0, and the largest, of dtypes in which kernels compute; that of float64 is that of a float.
#: Kernels flush subnormal numbers of float32 to zero.
RANGES = {"float32": (2.0**-126, 2.0**128 - 2.0**104)}


def epsilon(value: object, name: str = "eps") -> float:
    """eps as a float: finite and not negative."""
    if value.__class__ is float and 0 <= value < float("inf"):
        return value  # fast path, taken in every call
    found = number(name, value)
    if not 0 <= found < float("inf"):
        raise ValueError(f"{name}: {found}, expected a finite number of at least 0")
    return found


def is_in_range(value: float, dtype: str) -> bool:
    """Whether a float does not become 0 or infinite when it is rounded to a dtype."""
    least, most = RANGES.get(dtype, (0.0, float("inf")))
    return not value or least <= abs(value) <= most


def in_range(name: str, value: float, dtype: str, why: str) -> None:
    """Check that a float `is_in_range` of a dtype (ValueError)."""
    if not is_in_range(value, dtype):
        least, most = RANGES.get(dtype, (0.0, float("inf")))
        raise ValueError(
            f"{name}: {value}, expected 0 or a magnitude from {least:.2g} to {most:.2g}, the range of {dtype}{why}"
        )


def flag(name: str, value: object) -> bool:
    """A value as a bool; an int is rejected (TypeError)."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: {said(value)}, expected a bool")
    return bool(value)


def choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Check that a value is one of those allowed (ValueError)."""
    if not any(isinstance(value, one.__class__) and value == one for one in allowed):
        raise ValueError(f"{name}: {said(value)}, expected {' or '.join(map(repr, allowed))}")


def mask(name: str, value: object, names: Sequence[str]) -> tuple[bool, ...]:
    """An output mask as a tuple with one bool per result, from a sequence or a NumPy array of bools."""
    is_vector = isinstance(value, np.ndarray) and value.ndim == 1
    if not is_vector and (not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray))):
        raise TypeError(f"{name}: {said(value)}, expected a tuple of {len(names)} bools for {', '.join(names)}")
    flags = cast("Sequence[object]", value)
    if len(flags) != len(names):
        raise ValueError(f"{name}: {len(flags)} flags, expected {len(names)} for {', '.join(names)}")
    for wanted in value.tolist() if isinstance(value, np.ndarray) else flags:
        if not isinstance(wanted, (bool, np.bool_)):
            raise TypeError(f"{name}: contains {said(wanted)}, expected bools")
    return tuple(bool(wanted) for wanted in flags)


def pointer(array: Array) -> int:
    """The address of the first element."""
    if not isinstance(array, np.ndarray):
        return int(array.data.ptr)
    return _word(array) if _DATA_FIRST else _asked(array)


def addresses(kind: str, arrays: Iterable[Array | None]) -> tuple[int, ...]:
    """The addresses of the first elements, 0 for an absent array."""
    if kind == "gpu":
        return tuple([0 if array is None else array.data.ptr for array in arrays])
    if _DATA_FIRST:
        return tuple([0 if array is None else _word_at(id(array) + _HEAD).value or 0 for array in arrays])
    return tuple([0 if array is None else _asked(array) for array in arrays])


# NumPy's Python interface creates a dictionary or an object to return an address. For nine arrays that costs as much as
# the rest of a call. In NumPy's C structure, unchanged for decades, the data pointer is the first field after the
# object header: `_word` reads it there. If the probe below finds another address, `_asked` uses the Python interface.
def _asked(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _word(array: np.ndarray) -> int:
    return _word_at(id(array) + _HEAD).value or 0


_word_at, _HEAD = ctypes.c_void_p.from_address, object.__basicsize__
_probe = np.empty(1)
_DATA_FIRST = sys.implementation.name == "cpython" and _word(_probe) == _asked(_probe)


#: Candidates that NumPy may try to decide whether two strided arrays share memory; after that they count as sharing it.
SHARING_WORK = 10**6


def elements_apart(array: Array) -> bool:
    """Whether the strides guarantee that no two elements of an array share memory.

    They do if each stride is at least the extent of all axes with smaller strides.
    """
    reach = array.dtype.itemsize
    steps = sorted((abs(stride), size) for stride, size in zip(array.strides, array.shape, strict=True) if size > 1)
    for stride, size in steps:
        if stride < reach and array.size:
            return False
        reach += stride * (size - 1)
    return True


class _Shadow:
    """The address, shape and strides of an array, for NumPy to compute with; its memory is never read."""

    def __init__(self, array: Array) -> None:
        self.__array_interface__ = {
            "data": (pointer(array), False),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.dtype.itemsize}",
            "version": 3,
        }


def _shadow(array: Array) -> np.ndarray:
    """A NumPy array with the address, shape and strides of an array of either kind.

    Only its strides and addresses may be used. Its elements must not be read: they may be on a GPU.
    """
    return np.asarray(_Shadow(array))


def share_elements(a: Array, b: Array) -> bool:
    """Whether two arrays of either kind share a byte. Disjoint interleaved slices of one tensor do not."""
    try:
        return np.shares_memory(_shadow(a), _shadow(b), max_work=SHARING_WORK)  # type: ignore[arg-type]  # the stubs allow two values
    except np.exceptions.TooHardError:
        return True


def overlap(a: Array, a_span: tuple[int, int], b: Array, b_span: tuple[int, int]) -> bool:
    """Whether two arrays with these spans share a byte. Strides are compared only if the spans overlap."""
    return a_span[0] < b_span[1] and b_span[0] < a_span[1] and share_elements(a, b)


def same_elements(a: Array, b: Array) -> bool:
    """Whether two arrays of one dtype have the same shape and addresses. Strides of axes of size 1 are ignored."""
    steps = [[stride for stride, size in zip(array.strides, array.shape, strict=True) if size > 1] for array in (a, b)]
    return bool(a.shape == b.shape and steps[0] == steps[1] and pointer(a) == pointer(b))


def span(array: Array) -> tuple[int, int]:
    """The address range of an array's elements: [low, high)."""
    start, (before, behind) = pointer(array), extent(array)
    return start - before, start + behind


def extent(array: Array) -> tuple[int, int]:
    """The pair (low, high), bytes: an array's elements occupy [pointer - low, pointer + high)."""
    if array.size == 0:
        return 0, 0
    reach = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    return -sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + array.dtype.itemsize


def row_stride(array: Array) -> int | None:
    """Number of elements from one row of an array, of 0 to 2 dimensions, to the next.

    None if kernels cannot read it with such a stride: the elements of a row are not adjacent, or the stride is negative
    or not a multiple of the element size.
    """
    itemsize = array.dtype.itemsize
    row = array.shape[-1] if array.ndim == 2 else 1
    if row > 1 and array.strides[-1] != itemsize:
        return None
    if array.ndim == 0 or array.shape[0] <= 1:
        return row
    stride, rest = divmod(array.strides[0], itemsize)
    return None if rest or stride < 0 else stride


def plain(array: Array) -> Array:
    """The array, without a NumPy subclass: numpy.matrix, for example, changes shapes."""
    return np.asarray(array) if isinstance(array, np.ndarray) else array


def view_as(array: Array, shape: tuple[int, ...]) -> Array | None:
    """A view of the elements, in C order, in another shape of the same size; None if that needs a copy."""
    if isinstance(array, np.ndarray):
        try:
            return np.asarray(array).reshape(shape, copy=False)
        except ValueError:
            return None
    if array.size == 0:
        return array.reshape(shape)
    try:
        strides = _shadow(array).reshape(shape, copy=False).strides
    except ValueError:
        return None
    return namespace("gpu").ndarray(shape, array.dtype, array.data, strides)


def in_one_piece(array: Array) -> Array | None:
    """The memory of an array as one contiguous array of bytes; None if it has gaps, or elements share memory."""
    flat = plain(array)
    flat = flat.reshape(1) if flat.ndim == 0 else flat
    flat = flat[tuple([slice(None, None, -1 if stride < 0 else 1) for stride in flat.strides])]
    flat = flat.transpose(sorted(range(flat.ndim), key=lambda axis: -flat.strides[axis]))
    return flat.reshape(-1).view(np.uint8) if flat.flags.c_contiguous else None
