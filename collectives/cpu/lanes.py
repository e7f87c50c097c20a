"""Vectors of 64 float32 in numba kernels: what is compared becomes the bits of one integer, so that few entries are found fast.

LLVM splits a vector into the registers of the processor: AVX-512, AVX2, SSE2 or another's. All give the same bits.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.extending import models, register_model

LANES = 64
"""Elements of a vector; lane i is bit i of a mask."""

LINE = 16
"""Elements of a cache line, of 64 bytes. Where a processor's are longer, as on some of ARM, kernels are as right, but slower."""

intrinsic: Any = extending.intrinsic  # what it makes is called without the first argument
_INT, _BIT = ir.IntType(32), ir.IntType(1)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_INTS = ir.VectorType(_INT, LANES)
_LINE = ir.VectorType(ir.FloatType(), LINE)
_BITS = ir.VectorType(_BIT, LANES)
_MASK = ir.IntType(LANES)
_MAGNITUDE = ir.Constant(_INTS, [0x7FFFFFFF] * LANES)


class _Lanes(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Lanes")


LANES_TYPE = _Lanes()


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)


def _is_vector(array: Any) -> bool:
    return isinstance(array, types.Array) and (array.dtype, array.ndim, array.layout) == (
        types.float32,
        1,
        "C",
    )


def _pointer(context: Any, builder: Any, kind: Any, array: Any, at: Any, to: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), to.as_pointer())


@intrinsic
def load(typing: Any, array: Any, at: Any) -> Any:
    """The lanes array[at : at + LANES] of float32[n], C-contiguous; not checked against n."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, at = arguments
        return builder.load(_pointer(context, builder, signature.args[0], array, at, _FLOATS), align=4)

    return (LANES_TYPE(array, types.intp), generate) if _is_vector(array) else None


@intrinsic
def store(typing: Any, array: Any, at: Any, lanes: Any) -> Any:
    """array[at : at + LANES] = lanes, of float32[n], C-contiguous; not checked against n."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, at, lanes = arguments
        builder.store(lanes, _pointer(context, builder, signature.args[0], array, at, _FLOATS), align=4)
        return context.get_dummy_value()

    return (types.void(array, types.intp, LANES_TYPE), generate) if _is_vector(array) else None


def _by_lane(operation: str, text: str) -> Any:
    """What combines two vectors lane by lane; each result is rounded, and fused with no other."""

    @intrinsic
    def combined(typing: Any, one: Any, other: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return getattr(builder, operation)(*arguments)

        return LANES_TYPE(LANES_TYPE, LANES_TYPE), generate

    combined.__doc__ = text
    return combined


add = _by_lane("fadd", "one + other, lane by lane.")
subtract = _by_lane("fsub", "one - other, lane by lane.")
multiply = _by_lane("fmul", "one · other, lane by lane.")
divide = _by_lane("fdiv", "one / other, lane by lane.")


@intrinsic
def root(typing: Any, lanes: Any) -> Any:
    """The square roots, each rounded to nearest."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.call(_of_lanes(builder, "sqrt", 1), arguments)

    return LANES_TYPE(LANES_TYPE), generate


@intrinsic
def fused(typing: Any, one: Any, other: Any, added: Any) -> Any:
    """one · other + added, lane by lane, rounded once; slow on processors without such an instruction."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.call(_of_lanes(builder, "fma", 3), arguments)

    return LANES_TYPE(LANES_TYPE, LANES_TYPE, LANES_TYPE), generate


def _of_lanes(builder: Any, name: str, arguments: int) -> Any:
    """LLVM's function of whole vectors by this name."""
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * arguments)
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32")


@intrinsic
def spread(typing: Any, value: Any) -> Any:
    """A float32 in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        nothing, zeros = ir.Constant(_FLOATS, ir.Undefined), ir.Constant(_INTS, [0] * LANES)
        one = builder.insert_element(nothing, arguments[0], ir.Constant(_INT, 0))
        return builder.shuffle_vector(one, nothing, zeros)

    return LANES_TYPE(types.float32), generate


@intrinsic
def choose(typing: Any, mask: Any, one: Any, other: Any) -> Any:
    """The lanes of `one` where the mask has a bit, elsewhere those of `other`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        mask, one, other = arguments
        return builder.select(builder.bitcast(mask, _BITS), one, other)

    return LANES_TYPE(types.uint64, LANES_TYPE, LANES_TYPE), generate


@intrinsic
def reaching(typing: Any, lanes: Any, threshold: Any) -> Any:
    """uint64, the lanes whose magnitude has at least these bits, an int32; NaN reaches all finite magnitudes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes, threshold = arguments
        nothing, zeros = ir.Constant(_INTS, ir.Undefined), ir.Constant(_INTS, [0] * LANES)
        one = builder.insert_element(nothing, threshold, ir.Constant(_INT, 0))
        thresholds = builder.shuffle_vector(one, nothing, zeros)
        magnitudes = builder.and_(builder.bitcast(lanes, _INTS), _MAGNITUDE)
        return builder.bitcast(builder.icmp_signed(">=", magnitudes, thresholds), _MASK)

    return types.uint64(LANES_TYPE, types.int32), generate


@intrinsic
def lowest(typing: Any, mask: Any) -> Any:
    """int64, the lowest bit that is set in a uint64; LANES where none is."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(_BIT, 0))

    return types.int64(types.uint64), generate


@intrinsic
def count(typing: Any, mask: Any) -> Any:
    """int64, the bits that are set in a uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


@intrinsic
def prefetch(typing: Any, array: Any, at: Any) -> Any:
    """Ask for the cache line of array[at], to be written; `at` may lie past the end."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, at = arguments
        pointer = _pointer(context, builder, signature.args[0], array, at, ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _INT, _INT, _INT])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        # to be written, to be used again, data
        builder.call(function, [pointer, *(ir.Constant(_INT, number) for number in (1, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@intrinsic
def stream_line(typing: Any, array: Any, at: Any, source: Any, start: Any) -> Any:
    """array[at : at + LINE] = source[start : start + LINE], both float32, C-contiguous; array[at] begins a cache line.

    The line is not read before, and does not stay in the cache. Call `fence` after the last one.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, at, source, start = arguments
        kinds = signature.args
        line = builder.load(_pointer(context, builder, kinds[2], source, start, _LINE), align=4)
        written = builder.store(line, _pointer(context, builder, kinds[0], array, at, _LINE), align=4 * LINE)
        written.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_INT, 1)]))
        return context.get_dummy_value()

    ours = _is_vector(array) and _is_vector(source)
    return (types.void(array, types.intp, source, types.intp), generate) if ours else None


@intrinsic
def fence(typing: Any) -> Any:
    """Let other threads and ranks see all that was written before what is written later."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _pointer_to(element: Any) -> Any:
    """What makes a pointer of an int64, for `numba.carray`."""

    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        """The elements that begin at an address."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), generate

    return pointer


floats_at, halves_at = _pointer_to(types.float32), _pointer_to(types.uint16)
"""An address as a pointer to float32, and to the bits of 16-bit floats; for `numba.carray`."""
