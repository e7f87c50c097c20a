// A region is summed in tiles of 2^shift elements, as wide as lets the sums of one lie in shared memory.
#pragma once

constexpr int NARROWEST = 12, WIDEST = 16;  // shifts
constexpr int NUM_CANDIDATES = 65;                   // of the ladder of thresholds that sums are counted on
