// The noise of fmms, scheme `group`: docs/noise.md states it. Integers agree bit for bit with every other
// implementation; weights, sums and keys are fp64, as in the reference.
#pragma once

#include "shared.h"

namespace mk {

constexpr int GROUP = 32, NOISE_BLOCK = 128, GROUPS_PER_BLOCK = NOISE_BLOCK / GROUP;

struct Words {
  uint32_t word[4];
};

// Philox4x32-10 (Salmon et al., SC 2011).
MK_DEVICE Words philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    uint64_t a = (uint64_t)c0 * 0xD2511F53u, b = (uint64_t)c2 * 0xCD9E8D57u;
    uint32_t n0 = (uint32_t)(b >> 32) ^ c1 ^ k0, n2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
    c1 = (uint32_t)b, c3 = (uint32_t)a, c0 = n0, c2 = n2;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return Words{{c0, c1, c2, c3}};
}

// Of a group of tokens, at a position, sample 0.
MK_DEVICE Words group_words(int64_t seed, int64_t position, int group) {
  constexpr uint32_t PURPOSE_GROUP = 1u << 24;
  return philox((uint32_t)group, PURPOSE_GROUP, (uint32_t)position, (uint32_t)((uint64_t)position >> 32), (uint32_t)seed,
                (uint32_t)((uint64_t)seed >> 32));
}

MK_DEVICE double uniform(uint32_t low, uint32_t high) {
  return ((double)high * 4294967296.0 + (double)low + 0.5) * 5.421010862427522e-20;  // 2^-64
}

MK_DEVICE double gumbel(uint32_t low, uint32_t high) {
  return -log(high >> 31 ? -log(uniform(~low, ~high)) : -log1p(-uniform(low, high)));
}

// The token with this place in a group.
MK_DEVICE int member(int group, int place) {
  return group / GROUPS_PER_BLOCK * NOISE_BLOCK + (place >> 1) * 8 + group % GROUPS_PER_BLOCK * 2 + (place & 1);
}

// Chooses one of 32 weights by a descent over pairwise sums. The rest of the uniform is carried in two numbers.
MK_DEVICE int descend(const double* weights, uint32_t low_word, uint32_t high_word) {
  constexpr double SIDE_RATIO = 0.61803400516510009765625;
  double sums[2 * GROUP];  // a heap: node i is the sum of 2i and 2i + 1
  for (int i = 0; i < GROUP; ++i) sums[GROUP + i] = weights[i];
  for (int i = GROUP - 1; i; --i) sums[i] = sums[2 * i] + sums[2 * i + 1];
  double coarse = (double)(high_word >> 6) * 1.4901161193847656e-08;  // 2^-26
  double fine = ((double)(high_word & 63u) * 4294967296.0 + (double)low_word + 0.5) * 5.421010862427522e-20;
  double total = sums[1], leading = (double)(float)total;
  double high = coarse * leading, low = coarse * (total - leading) + fine * total;
  int node = 1;
  while (node < GROUP) {
    double left = sums[2 * node], right = sums[2 * node + 1];
    bool right_first = right < SIDE_RATIO * left;
    double first = right_first ? right : left;
    double rest = high - first, rest_low = low + ((high - rest) - first);
    bool in_first = rest + rest_low < 0;
    if (!in_first) high = rest, low = rest_low;
    node = 2 * node + (in_first == right_first);
  }
  return node - GROUP;
}

}  // namespace mk
