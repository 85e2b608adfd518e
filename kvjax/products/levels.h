// Codes of 2, 4 and 8 bits as numbers in registers: what products with coded caches and with coded weights share.

#ifndef KVJAX_LEVELS_H_
#define KVJAX_LEVELS_H_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "vectors.h"

namespace {

typedef uint8_t Bytes __attribute__((vector_size(kLanes), aligned(1)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));

// Rows of x that share the decoded vectors in registers.
constexpr int kRows = 4;
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

// Calls run(first row, number of rows as a constant) for all rows.
template <typename F>
inline void OfRows(int64_t rows, const F& run) {
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows) run(r, std::integral_constant<int, kRows>{});
  for (; r + 2 <= rows; r += 2) run(r, std::integral_constant<int, 2>{});
  if (r < rows) run(r, std::integral_constant<int, 1>{});
}

}  // namespace

#endif  // KVJAX_LEVELS_H_
