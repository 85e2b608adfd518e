// Where the caches of a call lie in memory, of one layer or of a stack of layers.

#ifndef KVJAX_CACHES_H_
#define KVJAX_CACHES_H_

#include <algorithm>
#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace {

// The caches of an array of this shape, all of [B, ..., slots, dim], or those of one layer of [B, layers, ..., slots, dim].
struct Caches {
  explicit Caches(xla::ffi::Span<const int64_t> shape) : Caches(shape, 1, 0) {}
  Caches(xla::ffi::Span<const int64_t> shape, int64_t layer) : Caches(shape, LayersOf(shape), layer) {}

  // The first number of a cache.
  int64_t begin(int64_t i) const { return ((i / of_row * layers + layer) * of_row + i % of_row) * slots * dim; }

  // Whether the layer is one of the array's.
  bool known;
  int64_t count = 0, slots = 0, dim = 0;

 private:
  static int64_t LayersOf(xla::ffi::Span<const int64_t> shape) { return shape.size() > 1 ? shape[1] : 0; }

  Caches(xla::ffi::Span<const int64_t> shape, int64_t layers, int64_t layer)
      : of_row(1), layers(layers), layer(layer) {
    const size_t rank = shape.size();
    known = rank >= (layers == 1 && layer == 0 ? 2u : 4u) && 0 <= layer && layer < layers;
    if (!known) return;
    slots = shape[rank - 2], dim = shape[rank - 1], count = 1;
    for (size_t i = 0; i + 2 < rank; i++) count *= shape[i];
    count /= layers;
    for (size_t i = 1; i + 2 < rank; i++) of_row *= shape[i];
    of_row = std::max<int64_t>(of_row / layers, 1);
  }

  int64_t of_row, layers, layer;
};

}  // namespace

#endif  // KVJAX_CACHES_H_
