"""What hosts and kernels share: constants and structs, declared here once. CUDA gets them as a generated header."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

_SCALARS: dict[str, Any] = {
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "int": ctypes.c_int32,
    "unsigned": ctypes.c_uint32,
    "long long": ctypes.c_int64,
    "unsigned long long": ctypes.c_uint64,
}

MOST_PEERS = 32  # ranks with symmetric memory
MESSAGE_WORDS = 80  # of a signal's message, at most
MOST_DIGITS = 2048  # counters of a histogram of digits
LEVELS = 3  # histograms until a magnitude is known
# signals; DIGITS + level carries a whole histogram, the others at most MESSAGE_WORDS
SELECTED, COUNTED, KEPT, DIGITS, SIGNALS = 0, 1, 2, 3, 6
# rows of messages: one a signal that has any, and a second one of SELECTED, for launches that are ODD
ODD_SELECTED, MESSAGES = 3, 4
# why a step cannot go on without the host, the same on all ranks; 0: it can
PROCEED, BAD_SELECTION, BAD_THRESHOLD, SKEWED, NOT_FINITE, BAD_REGIONS, BAD_SUMS, ABORTED = range(8)
MISSING, RAISED, DIFFERS = 1, 2, 3  # why a rank is behind an abort
# how a step goes on (bits of its flags). CUT_TO_K: cut the selection to its top k wherever it holds as many, not only above the
# cap; where it holds fewer, and not all nonzeros, the step stops, unless it is deferred. DEFERRED: no host waits to help, so a
# threshold that missed by little does not stop the step; equal on all ranks. FLAGGED: this rank's gradient counts as not finite.
# ODD: of every second launch. A rank may launch the next one as soon as it knows that this one stopped at the selections, while
# kernels of another rank still read these.
CUT_TO_K, DEFERRED, FLAGGED, ODD = 1, 2, 4, 8
# set in the size of a selection that holds too few, which is above any cap then: all ranks stop
SHORT_BIT = 31
# set in the count of elements that are not finite of a selection of fewer than k/2, which a lower threshold would make longer
FEW_BIT = 31
NARROWEST, WIDEST = 12, 16  # a tile of a region is 2^shift elements
NUM_CANDIDATES = 65  # candidate thresholds
NUM_COUNTERS = NUM_CANDIDATES + 1  # of sums: at the candidates, and those that are not finite
DECISION_WORDS = 5  # before a decision's counts
COMPACT_THREADS, COMPACT_TILE = 256, 2048  # of a block that compacts; entries that it compacts
HOT_ROWS = 8  # equal rows that a warp adds up one by one; of more it loads many at a time
DECODE_WORDS = 128  # of a coded list's bitmap that a block decodes
MOST_DENSE_RANKS = 8  # of a dense allreduce over symmetric memory
DENSE_THREADS, DENSE_BLOCKS = 512, 512  # of its launches; blocks at most
DENSE_VECTORS = 2  # packs of 16 bytes a thread of a tile
DENSE_SLOTS = 2  # of a ring
CHUNK_BYTES, CHUNK_DATA = 512, 480  # of lines that a warp stores at once; of data in them
DENSE_ABORT = 1  # the epoch from which on it is aborted: its launches have epochs of their own


class Struct(ctypes.Structure):
    """A struct of kernels. Fields are set by name; an unknown name is an AttributeError; unset fields are 0."""

    __slots__ = ()


class Layouts:
    """Declarations for the kernels of one folder.

    Args:
        folder: of the `.cu` files.
        constants: integers, by name.
        base: declarations to build on.
    """

    def __init__(self, folder: Path, constants: dict[str, Any], base: Layouts | None = None) -> None:
        own = {name: value for name, value in constants.items() if name.isupper() and type(value) is int}
        self.constants: dict[str, int] = {**base.constants, **own} if base else own
        self._types: dict[str, Any] = dict(base._types if base else _SCALARS)
        self._text: str = (base._text if base else "using Entry = int2;\n") + "".join(
            f"[[maybe_unused]] constexpr int {name} = {value};\n" for name, value in own.items()
        )
        _OF_FOLDERS[folder.resolve()] = self

    def struct(self, name: str, fields: str, *kernels: str) -> Any:
        """Declare a struct, and the kernels that take one.

        Args:
            fields: as in C++: "const Entry* entries; unsigned counts[MOST_PEERS];". A pointer is an address in Python.
        """
        members = []
        for field in filter(None, map(str.strip, fields.split(";"))):
            kind, _, declarator = field.rpartition(" ")
            member, *sides = declarator.replace("]", "").split("[")
            c_type = ctypes.c_uint64 if kind.endswith("*") else self._types[kind]
            for side in reversed(sides):
                c_type *= int(side) if side.isdigit() else self.constants[side]
            members.append((member, c_type))
        struct_type = type(name, (Struct,), {"__slots__": (), "_fields_": members})
        self._types[name] = struct_type
        body = " ".join(fields.split())
        offsets = (
            f"offsetof({name}, {member}) == {getattr(struct_type, member).offset}" for member, _ in members
        )
        self._text += (
            f"struct {name} {{ {body} }};\n"
            f'static_assert(sizeof({name}) == {ctypes.sizeof(struct_type)}, "size of {name}");\n'
            f"#ifndef __CUDACC_RTC__\n"
            f'static_assert({" && ".join(offsets)}, "offsets of {name}");\n'
            "#endif\n"
        )
        for kernel in kernels:
            PARAMETERS[kernel] = struct_type
            # a definition that takes another type does not compile
            self._text += f'extern "C" {{ __global__ void {kernel}(const __grid_constant__ {name} p); }}\n'
        return struct_type

    @property
    def header(self) -> str:
        """The declarations as CUDA."""
        return f"#ifndef __CUDACC_RTC__\n#include <cstddef>\n#endif\n{self._text}"


PARAMETERS: dict[str, type[Struct]] = {}
"""Kernel -> the struct that it takes."""

_OF_FOLDERS: dict[Path, Layouts] = {}


def source_with_layouts(source: Path) -> str:
    """A `.cu` file behind the header that its folder's kernels need; errors keep the file's line numbers."""
    text = source.read_text(encoding="utf-8")
    layouts = _OF_FOLDERS.get(source.parent.resolve())
    return f'{layouts.header}#line 1 "{source.name}"\n{text}' if layouts else text


LAYOUTS = Layouts(Path(__file__).parent, globals())
struct = LAYOUTS.struct

# fmt: off
Scan = struct("Scan", "unsigned long long* status; unsigned long long* tie_status; unsigned* ticket; unsigned epoch;")
# What changes from step to step, in device memory, so that a captured step can be replayed
Step = struct("Step", """
    unsigned epoch; unsigned local_bits; unsigned global_bits; unsigned support; unsigned lower; int tiles;
    int shift; unsigned flags;""")
# What all ranks decided alike. counts: sums each rank keeps; after a stop for NOT_FINITE its elements that are not finite. total:
# sums kept; after a stop for BAD_THRESHOLD those that reach the candidate nearest k. few: some selection has FEW_BIT.
Decision = struct("Decision", """
    unsigned stop; unsigned nearest; unsigned bits; unsigned total; unsigned few;
    unsigned counts[MOST_PEERS]; unsigned starts[MOST_PEERS];""")
# aborted: 0, or the epoch from which on no rank waits any more; reasons: by rank, why it is behind that, if it is
WindowHead = struct("WindowHead", """
    unsigned aborted; unsigned reasons[MOST_PEERS];
    unsigned signals[SIGNALS][MOST_PEERS]; unsigned messages[MESSAGES][MOST_PEERS][MESSAGE_WORDS];
    unsigned digits[LEVELS][MOST_PEERS][MOST_DIGITS];""")
# windows: the address of every rank's window, null without symmetric memory. timeout: ns that a signal may be late
P2P = struct("P2P", """
    const unsigned long long* windows; int ranks; int rank; const Step* step; Decision* decision;
    unsigned long long timeout;""")
Region = struct("Region", "long long lower; int tiles; int shift; unsigned threshold; unsigned epoch;")
SumsState = struct("SumsState", """
    unsigned finished; unsigned overflowed; unsigned entries; unsigned kept_blocks;
    unsigned counters[NUM_COUNTERS];""")
# windows: as those of p2p, where a kernel finds them without a trip to memory. call: the type in 2 bits and the algorithm in 4
struct("DenseAllreduce", """
    P2P p2p; unsigned long long windows[MOST_DENSE_RANKS]; unsigned long long area; unsigned long long flags;
    unsigned long long calls_at; long long capacity; const void* in; void* out; const void* addend; long long n;
    float scale; int aligned; unsigned long long* counts; unsigned long long* calls; unsigned* nonfinite;
    volatile unsigned* report; unsigned call;""", "dense_one_shot", "dense_lines", "dense_two_shot", "dense_two_shot_lines")
struct("PutSelection", """
    P2P p2p; const Entry* entries; long long nnz; const long long* boundaries; unsigned* header;
    volatile unsigned long long* mailbox;""", "put_selection")
struct("PutKept", "P2P p2p;", "put_kept")
struct("AwaitSignal", "P2P p2p; int signal;", "await_signal")
struct("CollectRegion", """
    P2P p2p; unsigned long long packed_at; unsigned cap; unsigned capacity; Entry* pool; unsigned* splits;
    volatile unsigned* report;""", "collect_region")
struct("SplitTiles", """
    const Entry* pool; const long long* ranges; int lists; Region region; unsigned* splits;""", "split_tiles")
struct("SumTiles", """
    P2P p2p; const Entry* pool; const unsigned* splits; int lists; Region region; const long long* candidates;
    Entry* sums; unsigned* overflowed; SumsState* state; volatile unsigned* report;""", "sum_tiles", "sum_overflowed_tiles")
struct("KeepSums", """
    P2P p2p; const Entry* sums; unsigned threshold; unsigned capacity; Entry* kept; SumsState* state; Scan scan;
    volatile unsigned* report;""", "keep_sums")
struct("SplitAtLeast", """
    const Entry* entries; long long n; unsigned threshold; unsigned ties; Entry* kept; Entry* rest;
    unsigned capacity; Scan scan; volatile unsigned* report;""", "split_at_least")
struct("RegionOffsets", """
    const Entry* entries; long long n; const long long* boundaries; int count; volatile unsigned* report;""", "region_offsets")
struct("EqualCountSplits", """
    const Entry* entries; long long n; int parts; volatile unsigned* report;""", "equal_count_splits")
struct("WriteBlock", "const Entry* entries; long long n; long long lower; float* block;", "write_block")
struct("AddValues", "float* kept; const float* incoming; long long n;", "add_values")
struct("ScaleValues", "float* values; long long n; float scale; volatile unsigned* report;", "scale_values")
# of codec.cu, between launches: sums and damage of the launch that runs, all zero after it
CodecState = struct("CodecState", """
    double lost; double mass; unsigned finished; unsigned decoded; unsigned damage; unsigned unused;""")
struct("EncodeEntries", """
    Entry* entries; unsigned* wire; long long lower; unsigned count; unsigned bits; unsigned low_bits; unsigned values;
    unsigned lows; unsigned bitmap; unsigned words; int rounds; CodecState* state; volatile double* report;""", "encode_entries")
struct("DecodeEntries", """
    const unsigned* wire; Entry* out; long long lower; unsigned length; unsigned count; unsigned bits; unsigned low_bits;
    unsigned values; unsigned lows; unsigned bitmap; unsigned words; Scan scan; CodecState* state;
    volatile double* report;""", "decode_entries")
struct("EncodeValues", """
    Entry* entries; unsigned* wire; unsigned count; unsigned bits; unsigned values; unsigned words; int rounds; int unused;
    CodecState* state; volatile double* report;""", "encode_values")
struct("DecodeValues", """
    const unsigned* wire; Entry* out; long long n; unsigned bits; unsigned values; int add; int unused;
    volatile double* report;""", "decode_values")
# of rows.cu, in a sum of rows; zero before the first. hot: rows in the list of those that come more than HOT_ROWS times
RowState = struct("RowState", "unsigned finished; unsigned count; unsigned hot; unsigned outside; unsigned nonfinite;")
# what rows.cu tells the host; outside: whether a row is not of the table
RowsSummed = struct("RowsSummed", "unsigned count; unsigned outside; unsigned nonfinite;")
struct("PackRows", """
    const void* ids; long long n; long long length; unsigned long long* keys; RowState* state; int wide;
    int shift;""", "pack_rows")
struct("MergeRows", """
    unsigned long long ids[MOST_PEERS]; long long firsts[MOST_PEERS]; int lists; int wide; int shift; long long n;
    unsigned long long* keys; RowState* state;""", "merge_rows")
struct("MarkRows", """
    const unsigned long long* keys; long long n; void* ids; long long capacity; unsigned* starts; unsigned* hot; RowState* state;
    Scan scan; int wide; int shift; volatile unsigned* report;""", "mark_rows")
# firsts: of lists, whose rows are counted one list after the other; values: the address of each list less what is before it
struct("SumRows", """
    unsigned long long values[MOST_PEERS]; long long firsts[MOST_PEERS]; int lists; int vectors;
    const unsigned long long* keys; unsigned long long position; const unsigned* starts; const unsigned* hot; RowState* state;
    void* sums; long long capacity; long long width; float scale; volatile unsigned* report;""", "sum_rows", "sum_hot_rows")
struct("CutValues", "Entry* entries; const Entry* others; long long n;", "cut_values")
