// Products of a few rows with the keys and with the values of a cache, a part of its slots at a time.

#ifndef KVJAX_SLOTS_H_
#define KVJAX_SLOTS_H_

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "caches.h"
#include "vectors.h"

namespace {

// Rows of x that share the vectors of W in registers: with 4 inputs each, 16 factors and 8 vectors are held.
constexpr int kRows = 4;
// Where each row of W is an output: rows of x and of W whose products are summed in registers, of which AVX-512 has 32
// and other instruction sets have 16. W is loaded once for 8 rows; in two passes of 4, a table [50272, 768] was read at
// 17 GB/s instead of 26.
#if defined(__AVX512F__)
constexpr int kDotRows = 8;
#else
constexpr int kDotRows = 4;
#endif
constexpr int kDotOutputs = 3;
// Inputs of a block: so many of each of these rows fit in the first-level cache, or nearly.
constexpr int64_t kInputs = 1024;
constexpr int64_t kMaxRows = 64;
// The longest key, in numbers: sums over lanes are as much work as its products if it is short. Heads of 64, 96 x 2,048
// keys on a Zen 5: 40 GB/s instead of 27, where nothing but reading reaches 33 to 39.
constexpr int64_t kMaxKey = 512;
// Of so many rows each is multiplied by itself; of more, several at a time.
constexpr int64_t kMaxKeyRows = 4;
// Rows that share the vectors of a key in registers, and keys that share those of a row: kLanes sums.
constexpr int kKeyRows = kLanes > 8 ? 4 : 2;
constexpr int kKeys = kLanes / kKeyRows;
// Of the vectors of a cache: slots that one thread takes at a time.
constexpr int64_t kSlots = 256;
// Columns whose sums are in registers, for R rows: 16 sums, and 8 where there are 16 registers.
#if defined(__AVX512F__) || defined(__aarch64__)
template <int R>
constexpr int kVectors = 4;
#else
template <int R>
constexpr int kVectors = R < 4 ? 4 : 2;
#endif

// R rows of y for C outputs: dot products of rows of x with rows of W. The first rows of x ask for the next ones of W.
template <int R, int C, bool First, typename W>
inline void Dots(const float* x, const W* w, float* y, int64_t inputs, int64_t outputs, int64_t from, int64_t to) {
  Vector sum[R][C] = {};
  int64_t k = from;
  for (; k + kLanes <= to; k += kLanes) {
    Vector weight[C];
    for (int c = 0; c < C; c++) {
      weight[c] = Load(w + c * inputs + k);
      InRegister(weight[c]);
      if (First) Ahead(w + (c + C) * inputs + k);
    }
    for (int r = 0; r < R; r++) {
      Vector value = Load(x + r * inputs + k);
      InRegister(value);
      for (int c = 0; c < C; c++) sum[r][c] = Fma(value, weight[c], sum[r][c]);
    }
  }
  for (int r = 0; r < R; r++) {
    for (int c = 0; c < C; c++) {
      float total = (from == 0 ? 0 : y[r * outputs + c]) + Sum(sum[r][c]);
      for (int64_t i = k; i < to; i++) total = Fma(x[r * inputs + i], Scalar(w + c * inputs + i), total);
      y[r * outputs + c] = total;
    }
  }
}

template <int C, typename W>
void DotsOfAllRows(const float* x, const W* w, float* y, int64_t rows, int64_t inputs, int64_t outputs, int64_t from,
                   int64_t to) {
  int64_t b = 0;
  const auto run = [&](auto count) {
    for (; b + count.value <= rows; b += count.value) {
      const auto dots = b == 0 ? Dots<count.value, C, true, W> : Dots<count.value, C, false, W>;
      dots(x + b * inputs, w, y + b * outputs, inputs, outputs, from, to);
    }
  };
  run(std::integral_constant<int, kDotRows>{});
  run(std::integral_constant<int, 4>{});
  run(std::integral_constant<int, 2>{});
  run(std::integral_constant<int, 1>{});
}

// y[:, start:end] of y = x Wᵀ, W [outputs, inputs].
template <typename W>
void Rows(const float* x, const W* w, float* y, int64_t rows, int64_t inputs, int64_t outputs, int64_t start,
          int64_t end) {
  int64_t n = start;
  const auto run = [&](auto width) {
    for (; n + width.value <= end; n += width.value) {
      for (int64_t k = 0; k < inputs; k += kInputs) {
        DotsOfAllRows<width.value>(x, w + n * inputs, y + n, rows, inputs, outputs, k, std::min(inputs, k + kInputs));
      }
    }
  };
  run(std::integral_constant<int, kDotOutputs>{});
  run(std::integral_constant<int, 1>{});
}

// y[:count] = x Wᵀ of one row, for at most kLanes keys of V vectors each (V = 0: `inputs` says how many).
template <int V, typename W>
inline void KeysOfRow(const float* x, const W* w, float* y, int64_t inputs, int64_t count) {
  const int64_t vectors = V ? V : inputs / kLanes;
  Vector sum[kLanes];
  for (int key = 0; key < kLanes; key++) {
    sum[key] = Vector{};
    if (key >= count) continue;
    for (int64_t v = 0; v < vectors; v++)
      sum[key] = Fma(Load(x + v * kLanes), Load(w + key * vectors * kLanes + v * kLanes), sum[key]);
  }
  const Vector sums = Sums<kLanes>(sum);
  std::memcpy(y, &sums, std::min<int64_t>(count, kLanes) * sizeof(float));
}

// As `KeysOfRow`, for kKeyRows rows and kKeys keys, with the same sums.
template <int V, typename W>
inline void KeysOfRows(const float* x, const W* w, float* y, int64_t inputs, int64_t outputs) {
  const int64_t vectors = V ? V : inputs / kLanes;
  Vector sum[kLanes] = {};
  for (int64_t v = 0; v < vectors; v++) {
    Vector weight[kKeys];
    for (int key = 0; key < kKeys; key++) {
      weight[key] = Load(w + key * vectors * kLanes + v * kLanes);
      InRegister(weight[key]);
    }
    for (int r = 0; r < kKeyRows; r++) {
      const Vector value = Load(x + r * inputs + v * kLanes);
      for (int key = 0; key < kKeys; key++) sum[r * kKeys + key] = Fma(value, weight[key], sum[r * kKeys + key]);
    }
  }
  const Vector sums = Sums<kLanes>(sum);
  const float* each = reinterpret_cast<const float*>(&sums);
  for (int r = 0; r < kKeyRows; r++) std::memcpy(y + r * outputs, each + r * kKeys, kKeys * sizeof(float));
}

// y[:, start:end] of y = x Wᵀ for keys W [outputs, inputs], inputs a multiple of kLanes, at most kMaxKey. A result
// depends on its row and key alone.
template <int V, typename W>
void Keys(const float* x, const W* w, float* y, int64_t rows, int64_t inputs, int64_t outputs, int64_t start,
          int64_t end) {
  for (int64_t n = start; n < end; n += kLanes) {
    int64_t b = 0;
    for (; n + kLanes <= end && b + kKeyRows <= rows; b += kKeyRows) {
      for (int key = 0; key < kLanes; key += kKeys)
        KeysOfRows<V>(x + b * inputs, w + (n + key) * inputs, y + b * outputs + n + key, inputs, outputs);
    }
    for (; b < rows; b++) {
      const float* row = x + b * inputs;
      // With a constant number there are no branches.
      if (n + kLanes <= end)
        KeysOfRow<V>(row, w + n * inputs, y + b * outputs + n, inputs, kLanes);
      else
        KeysOfRow<V>(row, w + n * inputs, y + b * outputs + n, inputs, end - n);
    }
  }
}

inline bool AreKeys(int64_t inputs) { return inputs % kLanes == 0 && inputs <= kMaxKey; }

// As `Keys`, with the number of vectors known for heads of 64 and 128.
template <typename W>
void AnyKeys(const float* x, const W* w, float* y, int64_t rows, int64_t inputs, int64_t outputs, int64_t start,
             int64_t end) {
  const auto run = inputs == 64 ? Keys<64 / kLanes, W> : inputs == 128 ? Keys<128 / kLanes, W> : Keys<0, W>;
  run(x, w, y, rows, inputs, outputs, start, end);
}

// Adds x[:, :slots] W to R rows of y, for V vectors of columns; x has a row stride of `inputs`, W and y of `dim`.
template <int R, int V, typename W>
inline void AddSlots(const float* x, int64_t inputs, const W* w, int64_t dim, float* y, int64_t slots) {
  Vector sum[R][V] = {};
  for (int64_t s = 0; s < slots; s++) {
    Vector value[V];
    for (int v = 0; v < V; v++) {
      value[v] = Load(w + s * dim + v * kLanes);
      InRegister(value[v]);
    }
    for (int r = 0; r < R; r++) {
      const Vector factor = Splat(x[r * inputs + s]);
      for (int v = 0; v < V; v++) sum[r][v] = Fma(factor, value[v], sum[r][v]);
    }
  }
  for (int r = 0; r < R; r++) {
    for (int v = 0; v < V; v++) *reinterpret_cast<Vector*>(y + r * dim + v * kLanes) = sum[r][v];
  }
}

template <int R, typename W>
void AddSlotsOfRows(const float* x, int64_t inputs, const W* w, int64_t dim, float* y, int64_t slots) {
  int64_t n = 0;
  for (; n + kVectors<R> * kLanes <= dim; n += kVectors<R> * kLanes)
    AddSlots<R, kVectors<R>>(x, inputs, w + n, dim, y + n, slots);
  for (; n + kLanes <= dim; n += kLanes) AddSlots<R, 1>(x, inputs, w + n, dim, y + n, slots);
  for (; n < dim; n++) {
    for (int r = 0; r < R; r++) {
      float total = 0;
      for (int64_t s = 0; s < slots; s++) total = Fma(x[r * inputs + s], Scalar(w + s * dim + n), total);
      y[r * dim + n] = total;
    }
  }
}

// y = x W, W [slots, dim], for the first slots of W; x has a row stride of `inputs`.
template <typename W>
void SumOfSlots(const float* x, int64_t inputs, const W* w, int64_t dim, float* y, int64_t rows, int64_t slots) {
  int64_t b = 0;
  for (; b + kRows <= rows; b += kRows) AddSlotsOfRows<kRows>(x + b * inputs, inputs, w, dim, y + b * dim, slots);
  for (; b + 2 <= rows; b += 2) AddSlotsOfRows<2>(x + b * inputs, inputs, w, dim, y + b * dim, slots);
  if (b < rows) AddSlotsOfRows<1>(x + b * inputs, inputs, w, dim, y + b * dim, slots);
}

}  // namespace

#endif  // KVJAX_SLOTS_H_
