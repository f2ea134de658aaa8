// What one block computes and others read: each value lies in a word together with the number of the token that it was
// computed for, and both are written and read at once. Who reads waits until the number is the right one. So the value
// needs no order with anything else: neither a fence by the block that writes, which would wait for all that this block
// has on its way to and from memory, nor one by the block that reads.
//
// Before a launch no word has a number that the launch uses. In a launch a word is written once for each token, and only
// when all that read it for the token before have done so: what they computed from it led to the next token.
#pragma once

#include "wait.h"

namespace mk {

typedef uint32_t Tagged;       // bf16 in the upper half, tag in the lower
typedef uint64_t TaggedFloat;  // fp32 in the upper half, tag in the lower

// 0xffff is what fresh memory holds, MOST_ITERATIONS keep away from it.
MK_DEVICE uint32_t tag_of(int iteration) { return (uint32_t)iteration + 1; }

MK_DEVICE void post(Tagged* to, bf16 value, uint32_t tag) { store_relaxed(to, (uint32_t)value << 16 | tag); }
MK_DEVICE void post(TaggedFloat* to, float value, uint32_t tag) { store_relaxed(to, (uint64_t)float_to_bits(value) << 32 | tag); }
MK_DEVICE void post(Routing* to, int expert, float weight, uint32_t tag) {
  store_relaxed((uint64_t*)to, (uint64_t)float_to_bits(weight) << 32 | (uint32_t)expert << 16 | tag);
}

template <class Word>
MK_DEVICE bool has_tag(Word word, uint32_t tag) {
  return ((uint32_t)word & 0xffffu) == tag;
}

// Loads that found another tag. They give up with the launch; what is computed then does not count.
template <class Word>
MK_CALL Word load_again(const Word* from, uint32_t tag) {
  Spin spin;
  Word word;
  while (!has_tag(word = load_relaxed(from), tag))
    if (!spin.again()) break;
  return word;
}

// In two steps, so that several loads can be on their way: `word` was loaded from there.
template <class Word>
MK_DEVICE Word arrived(const Word* from, Word word, uint32_t tag) {
  return has_tag(word, tag) ? word : load_again(from, tag);
}
MK_DEVICE bf16 taken(const Tagged* from, uint32_t word, uint32_t tag) { return (bf16)(arrived(from, word, tag) >> 16); }

MK_DEVICE bf16 take(const Tagged* from, uint32_t tag) { return taken(from, load_relaxed(from), tag); }
MK_DEVICE float take(const TaggedFloat* from, uint32_t tag) {
  return bits_to_float((uint32_t)(arrived(from, load_relaxed(from), tag) >> 32));
}

struct Choice {
  int expert;
  float weight;
};
MK_DEVICE Choice take(const Routing* from, uint32_t tag) {
  const uint64_t* place = (const uint64_t*)from;
  uint64_t word = arrived(place, load_relaxed(place), tag);
  if (!has_tag(word, tag)) word = 0;  // the launch was given up, and this becomes an address
  return Choice{(int)((uint32_t)word >> 16), bits_to_float((uint32_t)(word >> 32))};
}

// Whether four words have the tag: 0 if they do.
MK_DEVICE uint32_t missing(const Vec16& words, uint32_t tag) {
  return ((words.word[0] ^ tag) | (words.word[1] ^ tag) | (words.word[2] ^ tag) | (words.word[3] ^ tag)) & 0xffffu;
}

// Eight values, as they lie in a vector of bf16.
MK_DEVICE Vec16 take_vector(const Tagged* from, uint32_t tag) {
  const Vec16* place = (const Vec16*)from;
  Vec16 first = load_relaxed(place), second = load_relaxed(place + 1);
  if (missing(first, tag) | missing(second, tag)) {
    Spin spin;
    while (spin.again()) {
      first = load_relaxed(place), second = load_relaxed(place + 1);
      if (!(missing(first, tag) | missing(second, tag))) break;
    }
  }
  Vec16 values;
  for (int i = 0; i < 2; ++i) {
    values.word[i] = first.word[2 * i] >> 16 | (first.word[2 * i + 1] & 0xffff0000u);
    values.word[2 + i] = second.word[2 * i] >> 16 | (second.word[2 * i + 1] & 0xffff0000u);
  }
  return values;
}

}  // namespace mk
