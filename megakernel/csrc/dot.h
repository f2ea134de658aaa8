// A sum of products over the lanes of a wave: each lane adds eight products at a time.
//
// Where there is a matrix unit it does the sums. Its product of sixteen rows by eight columns is more than is asked for:
// column g is what lanes 4 g to 4 g + 3 have of the weights, rows g and g + 8 are what they have of the vector, and only
// sums of a row with its own column are wanted. In the first of two products row g meets the first half of the weights,
// in the second row g + 8 meets the other half, so that what was loaded is multiplied as it lies in the registers.
#pragma once

#include "shared.h"

namespace mk {

#if defined(MK_MATRIX_UNIT)

// A lane's part of a vector, as `Dot` wants it.
MK_DEVICE Vec16 arranged(const Vec16& x) { return Vec16{{x.word[0], x.word[2], x.word[1], x.word[3]}}; }

struct Dot {
  float sums[2][4];  // of the first and of the second halves

  MK_DEVICE Dot() : sums{} {}
  // All of a wave call it.
  MK_DEVICE void add(const Vec16& weights, const Vec16& x) {
    multiply_matrices(sums[0], x, weights.word[0], weights.word[1]);
    multiply_matrices(sums[1], x, weights.word[2], weights.word[3]);
  }
  // Over each group of so many lanes, four or more; all lanes of a group get it. All of a wave call it.
  MK_DEVICE float over(int lanes) const {
    const float even = sums[0][0] + sums[1][2], odd = sums[0][1] + sums[1][3];
    float total = shuffle(lane() & 4 ? odd : even, (lane() & ~3) + lane() / 8);
    for (int mask = 4; mask < WAVE; mask *= 2) {
      const float other = shuffle_xor(total, mask);
      if (mask < lanes) total += other;
    }
    return total;
  }
};

#else

MK_DEVICE Vec16 arranged(const Vec16& x) { return x; }

struct Dot {
  float low, high;  // apart, so that fewer products wait for one another

  MK_DEVICE Dot() : low(0), high(0) {}
  MK_DEVICE void add(const Vec16& weights, const Vec16& x) {
    for (int j = 0; j < 4; ++j) {
      low = fmaf(low_half(weights.word[j]), low_half(x.word[j]), low);
      high = fmaf(high_half(weights.word[j]), high_half(x.word[j]), high);
    }
  }
  MK_DEVICE float over(int lanes) const {
    float total = low + high;
    MK_UNROLL(1)
    for (int mask = lanes / 2; mask; mask /= 2) total += shuffle_xor(total, mask);
    return total;
  }
};

#endif

}  // namespace mk
