// Products of a few rows with matrices of codes, for CPUs: XLA custom calls (jax.ffi). Codes are read once, in the order
// in which they lie in memory, and become numbers in registers; no decoded matrix is ever written.
//
// Two kinds of matrices. Vectors of a cache, whose codes lie along the channels: each slot has a scale and a zero for
// every group of channels, number = scale * level(code) + zero. With q_g the part of a query for group g, the product
// with a slot is sum_g scale_g * (q_g . level(c_g)) + zero_g * sum(q_g); and a sum of slots with weights p_s is, in
// group g, sum_s (p_s * scale_s) * level(c_s) + sum_s p_s * zero_s. And weights [in, out], grouped along the inputs,
// number = scale * (level(code) - zero).
//
// Sums are formed in an order that depends on the shapes of one matrix alone: a row's result depends neither on other
// rows, nor on the number of matrices or threads.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>
#include <vector>

#include "caches.h"
#include "vectors.h"

namespace {

typedef uint8_t Bytes __attribute__((vector_size(kLanes), aligned(1)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));

// Rows of x that share the decoded vectors in registers.
constexpr int kRows = 4;
// Vectors of sums of one row, times places of a byte: with 4 rows, half of the registers of AVX-512.
constexpr int kSums = 4;
// Slots that share the rows of x in registers.
constexpr int kSlots = 2;
// Slots whose factors are computed together, and which all rows use before the next are read: a multiple of kLanes.
constexpr int64_t kTile = 64;
// Slots of a part, which one thread takes at a time; sums of parts are added up in their order.
constexpr int64_t kPart = 2048;
// Columns of weights that a thread takes at a time: four cache lines of codes for each byte row, which often is a page of
// its own. With AVX-512, one row of x reads them together.
constexpr int64_t kStrip = 256;
// Rows of codes that are fetched ahead. The next strip would be too far: where rows lie a multiple of 4,096 bytes apart,
// as those of an output head do, their lines share a set of the cache and drive each other out.
constexpr int64_t kAhead = 32;
// Registers of columns that R rows of x add up: half of all registers are sums.
template <int R>
constexpr int kColumns = (kLanes == 16 ? 16 : 8) / R;
constexpr int64_t kMaxRows = 64;
constexpr int kTable = 16;  // levels of codes of up to 4 bits

template <typename To, typename From>
inline To As(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline Bytes LoadBytes(const uint8_t* p) { return *reinterpret_cast<const Bytes*>(p); }
inline Bytes LoadBytes(const uint8_t* p, int64_t n) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  return As<Bytes>(_mm_maskz_loadu_epi8((1u << n) - 1, p));
#endif
  Bytes bytes = {};
  std::memcpy(&bytes, p, n);
  return bytes;
}

// Codes as integers. GCC converts vectors of bytes in several steps, which takes three times as long.
inline Integers Unsigned(Bytes bytes) {
#if defined(__AVX512F__)
  return As<Integers>(_mm512_cvtepu8_epi32(As<__m128i>(bytes)));
#elif defined(__AVX2__)
  return As<Integers>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(As<int64_t>(bytes))));
#else
  return __builtin_convertvector(bytes, Integers);
#endif
}
inline Vector Floats(Integers integers) { return __builtin_convertvector(integers, Vector); }

// Each kind of levels reads bytes into kPlaces vectors, one for each place of a byte from the lowest bits up; numbers
// are to be multiplied by kUnit.

// Codes are numbers. On AVX2 this takes half as many instructions as a table of 16 levels.
template <int kBits>
struct Uniform {
  static constexpr int kPlaces = 8 / kBits;
  static constexpr float kUnit = 1;
  void Read(Bytes bytes, Vector* v) const {
    const Integers wide = Unsigned(bytes);
    for (int p = 0; p < kPlaces; p++) {
      const Integers code = wide >> (kBits * p);
      v[p] = Floats(p == kPlaces - 1 ? code : code & ((1 << kBits) - 1));
    }
  }
};

// Codes of 8 bits are numbers in two's complement.
struct Signed {
  static constexpr int kPlaces = 1;
  static constexpr float kUnit = 1;
  explicit Signed(const float*) {}
  void Read(Bytes bytes, Vector* v) const {
    v[0] = Floats((Unsigned(bytes) ^ 0x80) - 0x80);
  }
};

// Codes of 4 or 2 bits choose a level of a table.
template <int kBits>
struct Table {
  static constexpr int kPlaces = 8 / kBits;
  static constexpr float kUnit = 1;
  // Entries are repeated, so that the bits above a code need not be cleared.
  explicit Table(const float* given) {
    for (int i = 0; i < kTable; i++) table[i] = given[i & ((1 << kBits) - 1)];
#if defined(__AVX512F__)
    whole = _mm512_loadu_ps(table);
#elif defined(__AVX2__)
    low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8);
#endif
  }
  void Read(Bytes bytes, Vector* v) const {
    const Integers wide = Unsigned(bytes);
    for (int p = 0; p < kPlaces; p++) {
      const Integers code = wide >> (kBits * p);
#if defined(__AVX512F__)
      v[p] = As<Vector>(_mm512_permutexvar_ps(As<__m512i>(code), whole));
#elif defined(__AVX2__)
      const __m256i index = As<__m256i>(code);
      const __m256 fourth = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));  // as the sign
      v[p] = As<Vector>(_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index), _mm256_permutevar8x32_ps(high, index),
                                         fourth));
#else
      for (int i = 0; i < kLanes; i++) v[p][i] = table[code[i] & (kTable - 1)];
#endif
    }
  }
  float table[kTable];
#if defined(__AVX512F__)
  __m512 whole;
#elif defined(__AVX2__)
  __m256 low, high;
#endif
};

// Codes are floats of 8 bits, e4m3fn. As the upper bits of a float of 16 bits, whose exponent has one bit more, they are
// the number times 2^-8, subnormal ones too. A code that is not a number becomes a finite one.
struct E4m3 {
  static constexpr int kPlaces = 1;
  static constexpr float kUnit = 256;
  explicit E4m3(const float*) {}
  void Read(Bytes bytes, Vector* v) const {
#if defined(__AVX512F__)
    const Halves half = As<Halves>(_mm256_cvtepi8_epi16(As<__m128i>(bytes))) << 7 & 0xbfff;
    v[0] = As<Vector>(_mm512_cvtph_ps(As<__m256i>(half)));
#elif defined(__AVX2__) && defined(__F16C__)
    const Halves half = As<Halves>(_mm_cvtepi8_epi16(_mm_cvtsi64_si128(As<int64_t>(bytes)))) << 7 & 0xbfff;
    v[0] = As<Vector>(_mm256_cvtph_ps(As<__m128i>(half)));
#else
    const Integers wide = Unsigned(bytes);
    const Integers rest = wide & 0x7f, sign = (wide & 0x80) << 24;
    const Integers normal = (rest << 20) + (112 << 23);
    // Products with a power of two are exact. Float32 has subnormal numbers, but they may be switched off.
    const Integers subnormal = As<Integers>(Floats(rest) * 0x1p-17f);
    const Integers is_normal = rest > 7;
    v[0] = As<Vector>(((normal & is_normal) | (subnormal & ~is_normal)) | sign);
#endif
  }
};

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

// Calls run(first row, number of rows as a constant) for all rows.
template <typename F>
inline void OfRows(int64_t rows, const F& run) {
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows) run(r, std::integral_constant<int, kRows>{});
  for (; r + 2 <= rows; r += 2) run(r, std::integral_constant<int, 2>{});
  if (r < rows) run(r, std::integral_constant<int, 1>{});
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

// Weights [in, out]: groups of `group` inputs, with places * byte_rows codes each.
struct Weights {
  int64_t inputs, outputs, groups, byte_rows;
};

// Adds R rows of x times one group of weights, for N registers of columns from n on, to y.
template <int R, int N, bool Whole, class L, typename Z>
inline void AddGroup(const L& levels, const Weights& of, const float* x, const float* totals, const uint8_t* codes,
                     const float* scale, const Z* zero, float* y, int64_t n) {
  constexpr int P = L::kPlaces;
  const int64_t rest = of.outputs - n;
  const auto read = [&](const uint8_t* p) { return Whole ? LoadBytes(p) : LoadBytes(p, rest); };
  // Scales and zeros of the next group, which no row of codes asks for.
  for (int k = 0; k < N; k++) {
    const int64_t next = of.outputs + n + k * kLanes;
    Ahead(scale + next);
    if (std::is_same_v<Z, float> || k % (64 / kLanes) == 0) Ahead(zero + next);
  }
  Vector sum[R][N] = {};
  for (int64_t j = 0; j < of.byte_rows; j++) {
    const uint8_t* row = codes + j * of.outputs + n;
    for (int k = 0; k < N; k += 64 / kLanes) Ahead(row + kAhead * of.outputs + k * kLanes);
    for (int k = 0; k < N; k++) {
      Vector v[P];
      levels.Read(read(row + k * kLanes), v);
      for (int p = 0; p < P; p++)
        for (int r = 0; r < R; r++) sum[r][k] = Fma(Splat(x[r * of.inputs + p * of.byte_rows + j]), v[p], sum[r][k]);
    }
  }
  const auto floats = [&](const float* p) {
    if (Whole) return Load(p);
    Vector v = {};
    std::memcpy(&v, p, rest * sizeof(float));
    return v;
  };
  for (int k = 0; k < N; k++) {
    Vector middle;
    if constexpr (std::is_same_v<Z, float>) {
      middle = floats(zero + n + k * kLanes);
    } else {
      middle = Floats(Unsigned(read(zero + n + k * kLanes)));
    }
    const Vector factor = floats(scale + n + k * kLanes);
    for (int r = 0; r < R; r++) {
      float* into = y + r * kStrip + k * kLanes;
      Store(into, Fma(factor, Fma(Splat(-totals[r * of.groups]), middle, sum[r][k]), Load(into)));
    }
  }
}

template <class L, typename Z>
void OfWeights(ffi::ThreadPool& pool, const L& levels, const Weights& of, const float* x, const uint8_t* codes,
               const float* scale, const Z* zero, float* y, int64_t rows) {
  const int64_t group = of.inputs / of.groups;
  std::vector<float> totals(rows * of.groups);
  // Of several groups at a time, because each addition of a sum waits for the one before.
  constexpr int64_t kTotals = 8;
  const int64_t all = rows * of.groups;
  for (int64_t from = 0; from < all; from += kTotals) {
    const int64_t to = std::min(all, from + kTotals);
    for (int64_t k = 0; k < group; k++)
      for (int64_t i = from; i < to; i++) totals[i] += x[i * group + k];
  }
  ForEach(pool, (of.outputs + kStrip - 1) / kStrip, [&](int64_t strip) {
    const int64_t start = strip * kStrip, columns = std::min(kStrip, of.outputs - start);
    float sums[kMaxRows * kStrip];
    std::fill_n(sums, rows * kStrip, 0.0f);
    for (int64_t g = 0; g < of.groups; g++) {
      OfRows(rows, [&](int64_t r, auto count) {
        constexpr int R = count.value;
        const auto add = [&](auto registers, auto whole, int64_t n) {
          AddGroup<R, registers.value, whole.value>(
              levels, of, x + r * of.inputs + g * group, totals.data() + r * of.groups + g,
              codes + g * of.byte_rows * of.outputs, scale + g * of.outputs, zero + g * of.outputs,
              sums + r * kStrip + n, start + n);
        };
        constexpr std::integral_constant<int, 1> one;
        constexpr std::integral_constant<int, 4> some;
        constexpr std::integral_constant<int, kColumns<R>> many;
        int64_t n = 0;
        for (; n + many.value * kLanes <= columns; n += many.value * kLanes) add(many, std::true_type{}, n);
        if constexpr (many > some)
          for (; n + some.value * kLanes <= columns; n += some.value * kLanes) add(some, std::true_type{}, n);
        for (; n + kLanes <= columns; n += kLanes) add(one, std::true_type{}, n);
        if (n < columns) add(one, std::false_type{}, n);
      });
    }
    for (int64_t r = 0; r < rows; r++) std::memcpy(y + r * of.outputs + start, sums + r * kStrip, columns * 4);
  });
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

// x [rows, in], codes [groups, byte rows, out], scale and zero [groups, out], zero of codes or of floats; y [rows, out].
ffi::Error RunWeights(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U8> codes,
                      ffi::Buffer<ffi::F32> scale, ffi::AnyBuffer zero, ffi::ResultBuffer<ffi::F32> y, int64_t bits) {
  if (y->element_count() == 0) return ffi::Error::Success();
  const auto shape = codes.dimensions();
  const Weights of{x.dimensions()[1], shape[2], shape[0], shape[1]};
  if (x.dimensions()[0] > kMaxRows) return ffi::Error::InvalidArgument("too many rows");
  const auto run = [&](const auto& levels, const auto* zeros) {
    OfWeights(pool, levels, of, x.typed_data(), codes.typed_data(), scale.typed_data(), zeros, y->typed_data(),
              x.dimensions()[0]);
    return ffi::Error::Success();
  };
  const auto run_bits = [&](const auto* zeros) {
    if (bits == 8) return run(Uniform<8>(), zeros);
    if (bits == 4) return run(Uniform<4>(), zeros);
    if (bits == 2) return run(Uniform<2>(), zeros);
    return ffi::Error::InvalidArgument("weights have codes of 2, 4 or 8 bits");
  };
  if (zero.element_type() == ffi::U8) return run_bits(static_cast<const uint8_t*>(zero.untyped_data()));
  if (zero.element_type() == ffi::F32) return run_bits(static_cast<const float*>(zero.untyped_data()));
  return ffi::Error::InvalidArgument("zeros are uint8 or float32");
}

// The product with one of several matrices of one shape, that of the given index: of a layer, in a loop over layers. The
// codes of all matrices come first, then all scales, then all zeros.
ffi::Error RunIndexedWeights(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> index,
                             ffi::RemainingArgs parts, ffi::ResultBuffer<ffi::F32> y, int64_t bits) {
  const int64_t count = parts.size() / 3, at = *index.typed_data();
  if (at < 0 || at >= count) return ffi::Error::InvalidArgument("no such matrix");
  const auto codes = parts.get<ffi::Buffer<ffi::U8>>(at);
  const auto scale = parts.get<ffi::Buffer<ffi::F32>>(count + at);
  const auto zero = parts.get<ffi::AnyBuffer>(2 * count + at);
  if (!codes.has_value()) return codes.error();
  if (!scale.has_value()) return scale.error();
  if (!zero.has_value()) return zero.error();
  return RunWeights(pool, x, *codes, *scale, *zero, y, bits);
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(KvjaxCodedWeights, RunWeights,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("bits"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(KvjaxIndexedCodedWeights, RunIndexedWeights,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("bits"));
