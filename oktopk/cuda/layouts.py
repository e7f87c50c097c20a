"""What hosts and the kernels of this folder share; see `collectives.cuda.layouts`."""

from __future__ import annotations

from pathlib import Path

from collectives.cuda import layouts as base
from oktopk.cpu.accumulate import TIED  # noqa: F401 - for the kernels

CHUNK = (
    4096  # elements that a block of accumulate_select adds, and that a word of a tensor list's table is about
)
MOST_GROUP = 32  # chunks that a block of compact_selection turns into a list
APPLY_ENTRIES = 128  # that a warp of gather_and_apply takes at once

LAYOUTS = base.Layouts(Path(__file__).parent, globals(), base.LAYOUTS)
struct = LAYOUTS.struct

# fmt: off
# a magnitude's search, digit by digit. candidates: of LocalSelection.learn_exact. ties: how many entries equal to the magnitude
# are kept. above, equal: entries of each rank above it and equal to it.
Search = struct("Search", """
    unsigned prefix; unsigned wanted; unsigned larger; unsigned candidates; unsigned ties;
    unsigned above[MOST_PEERS]; unsigned equal[MOST_PEERS];""")
TensorSpan = struct("TensorSpan", "long long begin; unsigned long long address;")
struct("AccumulateSelect", """
    const void* gradient; float* residual; long long n; const Step* step; unsigned threshold; unsigned capacity;
    Entry* pool; uint2* chunks; unsigned* totals; unsigned* cursor; unsigned* nonfinite; int shift;""",
    "accumulate_select", "accumulate_select_tensors", "accumulate_select_sum", "accumulate_select_displacement",
    "accumulate_select_adamw")
struct("CompactSelection", """
    P2P p2p; const Entry* pool; const uint2* chunks; unsigned num_chunks; int shift; unsigned* totals;
    unsigned* cursor; unsigned* nonfinite; unsigned* finished; Entry* entries; unsigned capacity; int regions;
    const long long* boundaries; unsigned* header; volatile unsigned* report; volatile unsigned long long* mailbox;
    unsigned k; unsigned cap; unsigned* needs_no_trim;""", "compact_selection")
struct("Accumulate", """
    const void* gradient; const float* residual; float* out; long long n; unsigned* nonfinite;""", "accumulate")
# of shard_sum.cuh: ranks windows, a gradient `first` bytes from the start of each
ShardSum = struct("ShardSum", """
    const unsigned long long* windows; long long first; long long block; int ranks; int shards; int shard; int unused;""")
# of displacement.cuh: before a tensor list
DisplacementHead = struct("DisplacementHead", "float* reference; float share; int unused;")
# of adamw.cuh: before a list of gradients. first, second: addresses of the moments; then ADAMW_TERMS
AdamWTensor = struct("AdamWTensor", """
    unsigned long long first; unsigned long long second; float weight; int from_gradient; float beta2; float square;
    float rate; float root; float eps; int unused;""")
AdamWHead = struct("AdamWHead", "const AdamWTensor* tensors; int count; int unused;")
struct("Show", """
    const void* displacement; const float* residual; const float* factors; long long n; int tensors;""", "show")
struct("SumShard", "ShardSum sum; float* out; long long n;", "sum_shard")
struct("AccumulateMoments", """
    const void* gradient; float* residual; long long n; double* sums; unsigned* nonfinite;""", "accumulate_moments")
struct("UndoAccumulate", """
    const void* gradient; float* residual; long long n; const Decision* decision; int all_added;""",
    "undo_accumulate", "undo_accumulate_tensors", "undo_accumulate_sum")
struct("CopyScaled", "const float* values; float* out; long long n; float scale;", "copy_scaled")
struct("LocateChunks", "unsigned long long* table; long long n; int tensors; int element_bytes;", "locate_chunks")
struct("CheckStep", """
    const unsigned long long* table; long long n; double* partial; unsigned* finished;
    const unsigned long long* places; const void* kept; volatile double* report; int samples; int unused;""",
    "check_step")
struct("SelectAtLeast", """
    const float* vector; long long n; unsigned threshold; unsigned ties; Entry* entries; unsigned capacity;
    Scan scan; volatile unsigned* report;""", "select_at_least")
struct("MagnitudeHistogram", """
    const unsigned* words; long long n; int first; int stride; int shift; int width; unsigned prefix;
    unsigned* counts;""", "magnitude_histogram")
struct("ClearSupport", "float* vector; const Entry* entries; long long n; const Step* step;", "clear_support")
struct("ApplyEntries", """
    float* vector; const Entry* entries; long long n; float scale;""", "write_scaled", "add_entries")
struct("ToWholeIndices", "Entry* entries; long long n; long long block; int shards; int shard;", "to_whole_indices")
struct("TakeValues", "const float* vector; const Entry* support; Entry* out; long long n;", "take_values")
struct("ClearCommon", """
    float* vector; const Entry* entries; const Entry* others; long long entries_nnz; long long n; int keep_values;
    int add;""", "clear_common")
struct("GatherAndApply", """
    P2P p2p; unsigned long long kept_at; Entry* gathered; float* update; float scale; const Entry* selected;
    const unsigned* header; float* residual;""", "gather_and_apply")
struct("Decide", """
    P2P p2p; const long long* candidates; long long k; long long cap; double tolerance; double miss; double trigger;
    volatile unsigned long long* mailbox;""", "decide")
struct("KthHistogram", """
    P2P p2p; const Entry* entries; const unsigned* count; const unsigned* skip; unsigned most_equal; unsigned k;
    int level; int shift; int width; Search* search; unsigned* counts; unsigned* finished;""", "kth_histogram")
struct("AgreeOnDigit", """
    P2P p2p; unsigned k; int level; int width; double trigger; Search* search;
    volatile unsigned long long* mailbox;""", "agree_on_digit")
struct("TakeExact", """
    P2P p2p; const Entry* entries; const unsigned* count; const Search* search; Entry* kept; unsigned capacity;
    Scan scan;""", "take_exact")
struct("TrimSelection", """
    P2P p2p; Entry* entries; unsigned capacity; const Search* search; const unsigned* needs_no_trim; Scan scan;
    unsigned* trimmed; unsigned* finished; const long long* boundaries; unsigned* header;
    volatile unsigned long long* mailbox;""", "trim_selection")
