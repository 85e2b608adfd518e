// Products of a few rows with the vectors of a cache, held as codes, for CPUs: XLA custom calls (jax.ffi). Codes are read
// once, in the order in which they lie in memory, and become numbers in registers; no decoded vector is ever written.
//
// Codes lie along the channels: each slot has a scale and a zero for every group of channels, number = scale *
// level(code) + zero. With q_g the part of a query for group g, the product with a slot is sum_g scale_g * (q_g .
// level(c_g)) + zero_g * sum(q_g); and a sum of slots with weights p_s is, in group g, sum_s (p_s * scale_s) * level(c_s)
// + sum_s p_s * zero_s.
//
// Sums are formed in an order that depends on the shapes of one cache alone: a row's result depends neither on other
// rows, nor on the number of caches or threads.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>
#include <vector>

#include "caches.h"
#include "levels.h"
#include "vectors.h"

namespace {

// Vectors of sums of one row, times places of a byte: with 4 rows, half of the registers of AVX-512.
constexpr int kSums = 4;
// Slots that share the rows of x in registers.
constexpr int kSlots = 2;
// Slots whose factors are computed together, and which all rows use before the next are read: a multiple of kLanes.
constexpr int64_t kTile = 64;
// Slots of a part, which one thread takes at a time; sums of parts are added up in their order.
constexpr int64_t kPart = 2048;

// How the vectors of a cache lie in memory. Bytes of a group are padded to whole registers where they are floats.
struct Vectors {
  int64_t slots, dim, bytes, groups, group_bytes, places, padded;
  int64_t coded() const { return groups * places * padded; }
  // Where the float of a channel is.
  int64_t at(int64_t channel) const {
    const int64_t in_group = groups == 1 ? channel : channel % (group_bytes * places);
    const int64_t group = groups == 1 ? 0 : channel / (group_bytes * places);
    return (group * places + in_group % places) * padded + in_group / places;
  }
};

// The products of R rows with the channels of one group of N slots, as vectors whose entries are to be added up, sums
// [R, kLanes]. x [R, coded] and codes are of the group.
template <int R, int N, class L>
inline void DotSlots(const L& levels, const Vectors& of, const float* x, const uint8_t* codes, Vector* sums) {
  constexpr int P = L::kPlaces;
  Vector sum[N][R] = {};
  const auto add = [&](const Bytes* bytes, int64_t n) {
    Vector v[N][P];
    for (int s = 0; s < N; s++) levels.Read(bytes[s], v[s]);
    for (int p = 0; p < P; p++) {
      for (int r = 0; r < R; r++) {
        const Vector row = Load(x + r * of.coded() + p * of.padded + n);
        for (int s = 0; s < N; s++) sum[s][r] = Fma(v[s][p], row, sum[s][r]);
      }
    }
  };
  Bytes bytes[N];
  int64_t n = 0;
  for (; n + kLanes <= of.group_bytes; n += kLanes) {
    for (int s = 0; s < N; s++) bytes[s] = LoadBytes(codes + s * of.bytes + n);
    add(bytes, n);
  }
  if (n < of.group_bytes) {
    for (int s = 0; s < N; s++) bytes[s] = LoadBytes(codes + s * of.bytes + n, of.group_bytes - n);
    add(bytes, n);
  }
  for (int s = 0; s < N; s++) {
    for (int r = 0; r < R; r++) sums[r * kLanes + s] = sum[s][r];
  }
}

// y[r, from:from + count] of the products of R rows with slots, at most kLanes. x [R, coded], totals [R, groups]: the
// sums of x.
template <int R, class L>
void Dots(const L& levels, const Vectors& of, const float* x, const float* totals, const uint8_t* codes,
          const float* scale, const float* zero, float* y, int64_t from, int64_t count) {
  Vector total[R] = {}, sums[R * kLanes];
  if (count < kLanes) std::memset(sums, 0, sizeof(sums));
  const auto of_group = [&](const float* numbers, int64_t g) {
    Vector own = {};
    if (of.groups == 1 && count == kLanes)
      own = Load(numbers + from);
    else
      for (int64_t s = 0; s < count; s++) own[s] = numbers[(from + s) * of.groups + g];
    return own;
  };
  for (int64_t g = 0; g < of.groups; g++) {
    const float* own = x + g * L::kPlaces * of.padded;
    const uint8_t* at = codes + from * of.bytes + g * of.group_bytes;
    int64_t s = 0;
    for (; s + kSlots <= count; s += kSlots) DotSlots<R, kSlots>(levels, of, own, at + s * of.bytes, sums + s);
    for (; s < count; s++) DotSlots<R, 1>(levels, of, own, at + s * of.bytes, sums + s);
    const Vector factor = (scale ? of_group(scale, g) : Splat(1)) * L::kUnit;
    for (int r = 0; r < R; r++) total[r] = Fma(factor, Sums<kLanes>(sums + r * kLanes), total[r]);
    if (zero) {
      const Vector own = of_group(zero, g);
      for (int r = 0; r < R; r++) total[r] = Fma(own, Splat(totals[r * of.groups + g]), total[r]);
    }
  }
  for (int r = 0; r < R; r++) std::memcpy(y + r * of.slots + from, &total[r], count * sizeof(float));
}

// Adds the vectors of `count` slots times factors [R, kTile] to sums [R, coded]; codes and sums are of one group. N
// registers of bytes from `start` on, of which the last may not be full.
template <int R, int N, class L>
void AddSlots(const L& levels, const Vectors& of, const float* factors, const uint8_t* codes, float* sums,
              int64_t start, int64_t count) {
  constexpr int P = L::kPlaces;
  const int64_t rest = of.group_bytes - start - (N - 1) * kLanes;
  Vector sum[R][N][P];
  const auto each = [&](auto run) {
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++)
        for (int p = 0; p < P; p++) run(sums + r * of.coded() + p * of.padded + start + n * kLanes, sum[r][n][p]);
  };
  each([](const float* from, Vector& v) { v = Load(from); });
  const auto add = [&](int64_t s, int n, Bytes bytes) {
    Vector v[P];
    levels.Read(bytes, v);
    for (int r = 0; r < R; r++)
      for (int p = 0; p < P; p++) sum[r][n][p] = Fma(Splat(factors[r * kTile + s]), v[p], sum[r][n][p]);
  };
  if (rest >= kLanes) {
    for (int64_t s = 0; s < count; s++)
      for (int n = 0; n < N; n++) add(s, n, LoadBytes(codes + s * of.bytes + start + n * kLanes));
  } else {
    for (int64_t s = 0; s < count; s++) {
      for (int n = 0; n < N - 1; n++) add(s, n, LoadBytes(codes + s * of.bytes + start + n * kLanes));
      add(s, N - 1, LoadBytes(codes + s * of.bytes + start + (N - 1) * kLanes, rest));
    }
  }
  each([](float* into, Vector v) { Store(into, v); });
}

// Adds the slots from `from` to before `to`, at most kTile, with weights x [R, slots], to sums [R, coded] and to zeros
// [R, groups, kLanes], which are to be added up.
template <int R, class L>
void AddTile(const L& levels, const Vectors& of, const float* x, const uint8_t* codes, const float* scale,
             const float* zero, float* sums, float* zeros, int64_t from, int64_t to) {
  constexpr int N = kSums / L::kPlaces;
  const int64_t count = to - from;
  float weights[R * kTile] = {}, factors[R * kTile], own[kTile] = {};
  for (int r = 0; r < R; r++) std::memcpy(weights + r * kTile, x + r * of.slots + from, count * sizeof(float));
  const auto of_group = [&](const float* numbers, int64_t g) {
    if (of.groups == 1) return static_cast<void>(std::memcpy(own, numbers + from, count * sizeof(float)));
    for (int64_t s = 0; s < count; s++) own[s] = numbers[(from + s) * of.groups + g];
  };
  for (int64_t g = 0; g < of.groups; g++) {
    if (zero) {
      of_group(zero, g);
      for (int r = 0; r < R; r++) {
        float* into = zeros + (r * of.groups + g) * kLanes;
        Vector sum = Load(into);
        for (int64_t s = 0; s < kTile; s += kLanes) sum = Fma(Load(weights + r * kTile + s), Load(own + s), sum);
        Store(into, sum);
      }
    }
    if (scale) of_group(scale, g);
    for (int r = 0; r < R; r++) {
      for (int64_t s = 0; s < kTile; s += kLanes) {
        const Vector weight = Load(weights + r * kTile + s);
        Store(factors + r * kTile + s, (scale ? weight * Load(own + s) : weight) * L::kUnit);
      }
    }
    const uint8_t* at = codes + from * of.bytes + g * of.group_bytes;
    float* into = sums + g * L::kPlaces * of.padded;
    int64_t n = 0;
    if constexpr (N > 1) {
      for (; n + N * kLanes <= of.group_bytes; n += N * kLanes)
        AddSlots<R, N>(levels, of, factors, at, into, n, count);
    }
    for (; n < of.group_bytes; n += kLanes) AddSlots<R, 1>(levels, of, factors, at, into, n, count);
  }
}

// The codes, scales or zeros of all caches of a call.
template <typename T>
struct Numbers {
  const T* data;  // null without any
  Caches caches;

  // Those of one cache.
  const T* operator()(int64_t i) const { return data ? data + caches.begin(i) : nullptr; }
};

template <class L>
void OfVectors(ffi::ThreadPool& pool, const L& levels, const Vectors& of, const float* x,
               const Numbers<uint8_t>& codes, const Numbers<float>& scale, const Numbers<float>& zero,
               const int32_t* used, float* y, int64_t count, int64_t rows, bool transposed) {
  const int64_t parts = (of.slots + kPart - 1) / kPart;
  // The end of what is read of a part of a cache. Whole tiles, so that a slot is always computed in the same way.
  const auto end_of = [&](int64_t i, int64_t start) {
    const int64_t tiles = used ? (std::max<int64_t>(used[i], 0) + kTile - 1) / kTile * kTile : of.slots;
    return std::min({of.slots, start + kPart, tiles});
  };
  if (transposed) {
    ForEach(pool, count * parts, [&](int64_t item) {
      const int64_t i = item / parts, start = item % parts * kPart, end = end_of(i, start);
      const int64_t rest = std::max(start, end), stop = std::min(of.slots, start + kPart);
      for (int64_t r = 0; r < rows; r++) {
        float* own = y + (i * rows + r) * of.slots;
        std::fill(own + rest, own + stop, 0.0f);
      }
      if (start >= end) return;
      std::vector<float> ordered(rows * of.coded()), totals(rows * of.groups);
      for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < of.dim; c++) {
          const float value = x[(i * rows + r) * of.dim + c];
          ordered[r * of.coded() + of.at(c)] = value;
          totals[r * of.groups + of.at(c) / (of.places * of.padded)] += value;
        }
      }
      for (int64_t from = start; from < end; from += kTile) {
        OfRows(rows, [&](int64_t r, auto count) {
          for (int64_t s = from; s < std::min(end, from + kTile); s += kLanes) {
            Dots<count.value>(levels, of, ordered.data() + r * of.coded(), totals.data() + r * of.groups,
                              codes(i), scale(i), zero(i), y + (i * rows + r) * of.slots, s,
                              std::min<int64_t>(kLanes, end - s));
          }
        });
      }
    });
    return;
  }
  // Of each part: the sums of all rows, and those of zeros.
  const int64_t size = rows * (of.coded() + of.groups * kLanes);
  std::vector<float> sums(count * parts * size);
  ForEach(pool, count * parts, [&](int64_t item) {
    const int64_t i = item / parts, start = item % parts * kPart, end = end_of(i, start);
    float *own = sums.data() + item * size, *zeros = own + rows * of.coded();
    for (int64_t from = start; from < end; from += kTile) {
      OfRows(rows, [&](int64_t r, auto count) {
        AddTile<count.value>(levels, of, x + (i * rows + r) * of.slots, codes(i), scale(i), zero(i),
                             own + r * of.coded(), zeros + r * of.groups * kLanes, from, std::min(end, from + kTile));
      });
    }
  });
  for (int64_t i = 0; i < count; i++) {
    float* own = sums.data() + i * parts * size;
    for (int64_t part = 1; part < parts; part++) {
      for (int64_t n = 0; n < size; n++) own[n] += own[part * size + n];
    }
    const float* zeros = own + rows * of.coded();
    for (int64_t r = 0; r < rows; r++) {
      for (int64_t c = 0; c < of.dim; c++) {
        const int64_t at = of.at(c), group = at / (of.places * of.padded);
        y[(i * rows + r) * of.dim + c] =
            own[r * of.coded() + at] + Sum(Load(zeros + (r * of.groups + group) * kLanes));
      }
    }
  }
}

// Calls run(levels) with the kind of levels that codes have: numbers, or others, which codes of fewer than 8 bits look up
// in a table.
template <typename F>
ffi::Error WithLevels(int64_t bits, std::string_view kind, const float* table, int64_t entries, const F& run) {
  if (bits < 8 && entries != int64_t{1} << bits) return ffi::Error::InvalidArgument("wrong number of levels");
  if (bits == 8 && kind == "e4m3")
    run(E4m3(nullptr));
  else if (bits == 8 && kind == "signed")
    run(Signed(nullptr));
  else if (bits == 8 && kind == "integer")
    run(Uniform<8>());
  else if (bits == 4 && kind == "integer")
    run(Uniform<4>());
  else if (bits == 4)
    run(Table<4>(table));
  else if (bits == 2 && kind == "integer")
    run(Uniform<2>());
  else if (bits == 2)
    run(Table<2>(table));
  else
    return ffi::Error::InvalidArgument("codes of unknown levels");
  return ffi::Error::Success();
}

// x [count, rows, D] if transposed, else [count, rows, slots]; codes [..., slots, bytes]; scale and zero [..., slots,
// groups], or empty; levels [2^bits] of codes of less than 8 bits, else empty; used [count], the number of slots that
// matter, the first ones, or empty; y [count, rows, slots], 0 for slots that are not read, or [count, rows, D]. In a stack
// of layers, codes are [rows, layers, ..., slots, bytes], and scale and zero may be of the same form.
ffi::Error RunVectorsOf(ffi::ThreadPool& pool, const ffi::Buffer<ffi::F32>& x, const ffi::Buffer<ffi::U8>& codes,
                        const ffi::Buffer<ffi::F32>& scale, const ffi::Buffer<ffi::F32>& zero,
                        const ffi::Buffer<ffi::F32>& levels, const ffi::Buffer<ffi::S32>& used,
                        ffi::ResultBuffer<ffi::F32>& y, int64_t bits, std::string_view kind, int64_t groups,
                        bool transposed, const int32_t* layer) {
  if (y->element_count() == 0) return ffi::Error::Success();
  const auto of_layer = [&](const auto& buffer) {
    const bool stacked = layer && buffer.dimensions().size() == codes.dimensions().size();
    return stacked ? Caches(buffer.dimensions(), *layer) : Caches(buffer.dimensions());
  };
  const Caches all = of_layer(codes);
  if (!all.known) return ffi::Error::InvalidArgument("no such layer");
  const int64_t count = all.count, slots = all.slots, bytes = all.dim, rows = x.dimensions()[1];
  const int64_t dim = transposed ? x.dimensions()[2] : y->dimensions()[2];
  if (rows > kMaxRows) return ffi::Error::InvalidArgument("too many rows");
  if (x.dimensions()[0] != count) return ffi::Error::InvalidArgument("rows of another number of caches");
  if (used.element_count() && static_cast<int64_t>(used.element_count()) != count)
    return ffi::Error::InvalidArgument("slots in use of another number of caches");
  const auto numbers = [&](const ffi::Buffer<ffi::F32>& buffer) {
    return buffer.element_count() ? Numbers<float>{buffer.typed_data(), of_layer(buffer)}
                                  : Numbers<float>{nullptr, all};
  };
  const Numbers<float> scales = numbers(scale), zeros = numbers(zero);
  for (const auto* each : {&scales, &zeros}) {
    const Caches& own = each->caches;
    if (each->data && !(own.known && own.count == count && own.slots == slots && own.dim == groups))
      return ffi::Error::InvalidArgument("scales or zeros of other caches");
  }
  if (slots == 0) {
    std::memset(y->typed_data(), 0, y->element_count() * sizeof(float));
    return ffi::Error::Success();
  }
  const int64_t group_bytes = bytes / groups;
  const Vectors of{slots, dim, bytes, groups, group_bytes, 8 / bits, (group_bytes + kLanes - 1) / kLanes * kLanes};
  return WithLevels(bits, kind, levels.typed_data(), levels.element_count(), [&](const auto& each) {
    OfVectors(pool, each, of, x.typed_data(), Numbers<uint8_t>{codes.typed_data(), all}, scales, zeros,
              used.element_count() ? used.typed_data() : nullptr, y->typed_data(), count, rows, transposed);
  });
}

ffi::Error RunVectors(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U8> codes,
                      ffi::Buffer<ffi::F32> scale, ffi::Buffer<ffi::F32> zero, ffi::Buffer<ffi::F32> levels,
                      ffi::Buffer<ffi::S32> used, ffi::ResultBuffer<ffi::F32> y, int64_t bits, std::string_view kind,
                      int64_t groups, bool transposed) {
  return RunVectorsOf(pool, x, codes, scale, zero, levels, used, y, bits, kind, groups, transposed, nullptr);
}

// The product with the caches of the layer of the given index, in a loop over layers.
ffi::Error RunIndexedVectors(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U8> codes,
                             ffi::Buffer<ffi::F32> scale, ffi::Buffer<ffi::F32> zero, ffi::Buffer<ffi::F32> levels,
                             ffi::Buffer<ffi::S32> used, ffi::Buffer<ffi::S32> index, ffi::ResultBuffer<ffi::F32> y,
                             int64_t bits, std::string_view kind, int64_t groups, bool transposed) {
  return RunVectorsOf(pool, x, codes, scale, zero, levels, used, y, bits, kind, groups, transposed,
                      index.typed_data());
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KvjaxCodedVectors, RunVectors,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("bits")
                                  .Attr<std::string_view>("kind")
                                  .Attr<int64_t>("groups")
                                  .Attr<bool>("transposed"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(KvjaxIndexedCodedVectors, RunIndexedVectors,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("bits")
                                  .Attr<std::string_view>("kind")
                                  .Attr<int64_t>("groups")
                                  .Attr<bool>("transposed"));
