// What the products share: vectors of floats in registers, and work that threads divide.

#ifndef KVJAX_VECTORS_H_
#define KVJAX_VECTORS_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>

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

inline Vector Load(const float* p) { return *reinterpret_cast<const Vector*>(p); }
inline Vector Load(const BFloat16* p) {
  Bits wide = __builtin_convertvector(*reinterpret_cast<const Halves*>(p), Bits) << 16;
  Vector v;
  std::memcpy(&v, &wide, sizeof(v));
  return v;
}
inline float Scalar(const float* p) { return *p; }
inline float Scalar(const BFloat16* p) {
  uint32_t wide = static_cast<uint32_t>(p->bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
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
typedef float Vector4 __attribute__((vector_size(16)));
typedef float Vector8 __attribute__((vector_size(32)));
// The sum of the lower and the upper half.
template <typename Half, typename Whole>
inline Half Fold(Whole v) {
  Half half[2];
  static_assert(sizeof(half) == sizeof(v));
  std::memcpy(half, &v, sizeof(v));
  return half[0] + half[1];
}
inline float Sum(Vector4 v) { return (v[0] + v[2]) + (v[1] + v[3]); }
#if defined(__AVX512F__)
inline float Sum(Vector v) { return Sum(Fold<Vector4>(Fold<Vector8>(v))); }
#elif defined(__AVX__)
inline float Sum(Vector v) { return Sum(Fold<Vector4>(v)); }
#endif

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
