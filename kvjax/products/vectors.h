// What the products share: vectors of floats in registers, and work that threads divide.

#ifndef KVJAX_VECTORS_H_
#define KVJAX_VECTORS_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;  // of a vector register
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Vector __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes), aligned(2)));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));

// Rounds of waiting, some 50 microseconds, before a thread gives its processor away.
constexpr int64_t kSpins = 2000;
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline Vector Load(const float* p) { return *reinterpret_cast<const Vector*>(p); }
inline Vector Load(const BFloat16* p) {
  Bits wide = __builtin_convertvector(*reinterpret_cast<const Halves*>(p), Bits) << 16;
  Vector v;
  std::memcpy(&v, &wide, sizeof(v));
  return v;
}
inline void Store(float* p, Vector v) { *reinterpret_cast<Vector*>(p) = v; }
inline float Scalar(const float* p) { return *p; }
inline float Scalar(const BFloat16* p) {
  uint32_t wide = static_cast<uint32_t>(p->bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}
// Moves the bits and adds 112 to the exponent, the difference of the biases. Subnormal numbers are converted from
// integers, since a processor may be set to take those of float32 for 0.
inline float Scalar(const Float16* p) {
  const uint32_t rest = p->bits & 0x7fff, sign = static_cast<uint32_t>(p->bits & 0x8000) << 16;
  const uint32_t wide = rest >= 0x7c00 ? rest << 13 | 0x7f800000 : (rest << 13) + (112 << 23);
  float value = static_cast<float>(rest) * 0x1p-24f;
  if (rest >= 0x400) std::memcpy(&value, &wide, sizeof(value));
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits |= sign;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline Vector Load(const Float16* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vector>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__F16C__)
  return reinterpret_cast<Vector>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__aarch64__)
  return reinterpret_cast<Vector>(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p)))));
#else
  Vector v;
  for (int i = 0; i < kLanes; i++) v[i] = Scalar(p + i);
  return v;
#endif
}
// Keeps a vector in a register. GCC would read it from memory again for each multiplication, of which loads are then
// the limit.
inline void InRegister(Vector& v) {
#if defined(__x86_64__)
  __asm__("" : "+v"(v));
#elif defined(__aarch64__)
  __asm__("" : "+w"(v));
#endif
}
// Asks for memory that is read soon, as far as the second-level cache: it can wait for many more lines at a time than
// the first, and 8 rows then read W at 22 to 24 GB/s instead of 16, where memory allows 26 to 27.
inline void Ahead(const void* p) { __builtin_prefetch(p, 0, 2); }
inline Vector Splat(float value) { return value - Vector{}; }

// a * b + c, rounded once where the processor can, else twice. Every sum of products is written with it, and the compiler
// may not join a product and a sum by itself (-ffp-contract=off): GCC does so for some numbers of rows and not for others,
// on Zen processors with vectors of 256 bits, and a row's result would depend on its neighbours.
#if defined(__x86_64__) && !defined(__FMA__)
inline float Fma(float a, float b, float c) { return a * b + c; }
#else
inline float Fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#endif
inline Vector Fma(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vector>(_mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b),
                                                  reinterpret_cast<__m512>(c)));
#elif defined(__FMA__)
  return reinterpret_cast<Vector>(_mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b),
                                                  reinterpret_cast<__m256>(c)));
#elif defined(__aarch64__)
  return reinterpret_cast<Vector>(vfmaq_f32(reinterpret_cast<float32x4_t>(c), reinterpret_cast<float32x4_t>(a),
                                            reinterpret_cast<float32x4_t>(b)));
#else
  return a * b + c;
#endif
}

// The sum of the lanes: of neighbours, then of pairs of neighbours, and so on.
inline float Sum(Vector v) {
#if defined(__AVX512F__)
  v += __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
#elif defined(__AVX__)
  v += __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
#else
  v += __builtin_shufflevector(v, v, 1, 0, 3, 2);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1);
#endif
  return v[0];
}

// The sums of neighbours in a and in b: in each chunk of 4 lanes two of a, then two of b, which one instruction picks.
inline Vector SumPairs(Vector a, Vector b) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
         __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
#elif defined(__AVX__)
  return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
         __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
#else
  return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}

// The sums of neighbouring chunks of 4 lanes in a, then those in b.
inline Vector SumChunks(Vector a, Vector b) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
#elif defined(__AVX__)
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
#else
  return a + b;  // never used: a vector is one chunk
#endif
}

// The sums over the lanes of N = kLanes vectors, each of which adds what `Sum` does in its order. Each level of additions
// halves the number of vectors; one by one takes 3 times as long.
template <int N>
inline Vector Sums(const Vector* v) {
  if constexpr (N == 1)
    return *v;
  else if constexpr (N <= 4)
    return SumPairs(Sums<N / 2>(v), Sums<N / 2>(v + N / 2));
  else
    return SumChunks(Sums<N / 2>(v), Sums<N / 2>(v + N / 2));
}

// Calls work(i) for all i < count, in the caller and in the threads of the pool. The caller waits only for work that
// has begun: a pool whose threads are all busy, or wait themselves, delays nothing.
template <typename F>
void ForEach(ffi::ThreadPool& pool, int64_t count, const F& work) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto shared = std::make_shared<Shared>();
  // `work` outlives every call of it: the caller returns when all `count` are done.
  auto run = [shared, count, &work] {
    for (int64_t i; (i = shared->next.fetch_add(1)) < count;) {
      work(i);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  int64_t helpers = std::min(pool.num_threads(), count) - 1;
  for (int64_t i = 0; i < helpers; i++) pool.Schedule(decltype(run)(run));
  run();
  for (int64_t spins = 0; shared->done.load(std::memory_order_acquire) < count; spins++) {
    // A helper that has lost its processor to another thread can have this one.
    if (spins > kSpins) std::this_thread::yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

}  // namespace

#endif  // KVJAX_VECTORS_H_
