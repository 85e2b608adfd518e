// Attention of a few queries per head over the slots of a cache that are in use, for CPUs: an XLA custom call (jax.ffi).
//
// Logits, their softmax and the sum of the values are computed for some slots at a time, which stay in the first-level
// cache, so that keys and values are read once and nothing else is written to memory.
//
// Every sum is formed in an order that depends on the slots alone, and not on how many are allocated, on the other
// queries, on the other rows of a batch, or on the number of threads: a token that is fed in a block gets the bits that
// it gets when it is fed by itself.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>

#include "slots.h"
#include "vectors.h"

namespace {

constexpr float kLowest = std::numeric_limits<float>::lowest();
// Below this, exp(x) is no normal number.
constexpr float kLeast = -87.0f;

// exp(x) for x <= 0, to 1e-7 of it, without branches. Cody and Waite: x = n log 2 + r.
inline Vector Exp(Vector x) {
  typedef int32_t Whole __attribute__((vector_size(4 * kLanes)));
  const Vector magic = Splat(12582912.0f);  // 1.5 * 2^23: its sum with n is rounded to a whole number
  x = x < kLeast ? Splat(kLeast) : x;
  const Vector n = (x * 1.44269504f + magic) - magic;
  const Vector r = Fma(n, Splat(-1.42860677e-6f), Fma(n, Splat(-0.693145752f), x));
  Vector sum = Splat(1.0f / 5040);
  for (const float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) sum = Fma(sum, r, Splat(term));
  const Whole bits = (__builtin_convertvector(n, Whole) + 127) << 23;
  Vector power;
  std::memcpy(&power, &bits, sizeof(power));
  return sum * power;
}
inline float Exp(float x) { return Exp(Splat(x))[0]; }

// What one row has found in a part of the slots.
struct Found {
  float top, total;
};

// Logits x [kSlots] become weights exp(x - top), 0 for a slot that is not seen; `seen` has 1 or 0 for each.
inline Found Weights(float* x, const float* seen, int64_t slots, float scale) {
  Vector tops = Splat(kLowest), totals = {};
  for (int64_t s = 0; s < slots; s += kLanes) {
    const Vector logit = Load(seen + s) > 0 ? Load(x + s) * scale : Splat(kLowest);
    Store(x + s, logit);
    tops = logit > tops ? logit : tops;
  }
  float top = tops[0];
  for (int j = 1; j < kLanes; j++) top = tops[j] > top ? tops[j] : top;
  for (int64_t s = 0; s < slots; s += kLanes) {
    const Vector weight = Load(seen + s) * Exp(Load(x + s) - top);
    Store(x + s, weight);
    totals += weight;
  }
  float total = totals[0];
  for (int j = 1; j < kLanes; j++) total += totals[j];
  return {top, total};
}

template <typename W>
struct Problem {
  const float* query;    // [count, rows, dim]; the rows are [heads, queries]
  const W *key, *value;  // where `caches` begin
  const bool* seen;      // [count, queries, slots]
  const int32_t* used;   // [count]
  float *output, *lse;   // [count, rows, dim] and [count, rows]
  int64_t rows, queries;
  float scale;
};

template <typename W>
void Attend(ffi::ThreadPool& pool, const Caches& caches, const Problem<W>& problem) {
  const int64_t count = caches.count, rows = problem.rows, queries = problem.queries, slots = caches.slots;
  const int64_t dim = caches.dim;
  const int64_t parts = (slots + kSlots - 1) / kSlots;
  const auto end = [&](int64_t i) { return std::clamp<int64_t>(problem.used[i], 0, slots); };
  const std::unique_ptr<float[]> sums(new float[count * parts * rows * dim]);
  const std::unique_ptr<Found[]> found(new Found[count * parts * rows]);
  ForEach(pool, count * parts, [&](int64_t i) {
    const int64_t product = i / parts, start = i % parts * kSlots;
    const int64_t size = std::min(end(product), start + kSlots) - start;
    if (size <= 0) return;
    // Whole vectors: there are as many logits beyond the last slot that are not seen.
    static thread_local float weights[kMaxRows * kSlots] __attribute__((aligned(64)));
    static thread_local float marks[kMaxRows * kSlots];
    const int64_t whole = (size + kLanes - 1) / kLanes * kLanes;
    for (int64_t q = 0; q < queries; q++) {
      const bool* seen = problem.seen + (product * queries + q) * slots + start;
      for (int64_t s = 0; s < size; s++) marks[q * kSlots + s] = seen[s] ? 1.0f : 0.0f;
      std::fill(marks + q * kSlots + size, marks + q * kSlots + whole, 0.0f);
    }
    const int64_t first = caches.begin(product) + start * dim;
    (AreKeys(dim) ? AnyKeys<W> : Rows<W>)(problem.query + product * rows * dim, problem.key + first, weights, rows,
                                          dim, kSlots, 0, size);
    for (int64_t r = 0; r < rows; r++) {
      float* own = weights + r * kSlots;
      std::fill(own + size, own + whole, 0.0f);
      found[i * rows + r] = Weights(own, marks + r % queries * kSlots, whole, problem.scale);
    }
    SumOfSlots<W>(weights, kSlots, problem.value + first, dim, sums.get() + i * rows * dim, rows, size);
  });
  for (int64_t product = 0; product < count; product++) {
    const int64_t own = (end(product) + kSlots - 1) / kSlots;
    for (int64_t r = 0; r < rows; r++) {
      const Found* of = found.get() + product * parts * rows + r;
      float top = kLowest, total = 0;
      for (int64_t part = 0; part < own; part++) top = std::max(top, of[part * rows].top);
      float* y = problem.output + (product * rows + r) * dim;
      std::fill(y, y + dim, 0.0f);
      for (int64_t part = 0; part < own; part++) {
        const float share = Exp(of[part * rows].top - top);
        const float* more = sums.get() + ((product * parts + part) * rows + r) * dim;
        total += share * of[part * rows].total;
        for (int64_t n = 0; n < dim; n++) y[n] = Fma(share, more[n], y[n]);
      }
      const float factor = total > 0 ? 1 / total : 0;
      for (int64_t n = 0; n < dim; n++) y[n] *= factor;
      problem.lse[product * rows + r] = total > 0 ? top + std::log(total) : -std::numeric_limits<float>::infinity();
    }
  }
}

// query [..., rows, dim], whose rows are [heads, queries]; seen [..., queries, slots]; used [...]: the number of slots up
// to the last one that a query sees; output [..., rows, dim] and the log-sum-exps of the logits, lse [..., rows]; in the
// order of the caches.
ffi::Error RunAttendOf(ffi::ThreadPool& pool, ffi::Buffer<ffi::F32> query, ffi::AnyBuffer key, ffi::AnyBuffer value,
                       const Caches& caches, ffi::Buffer<ffi::PRED> seen, ffi::Buffer<ffi::S32> used,
                       ffi::ResultBuffer<ffi::F32> output, ffi::ResultBuffer<ffi::F32> lse, float scale) {
  const auto shape = query.dimensions(), marks = seen.dimensions();
  const int64_t rows = shape[shape.size() - 2], queries = marks.size() < 2 ? 0 : marks[marks.size() - 2];
  if (!caches.known) return ffi::Error::InvalidArgument("there is no such layer of caches");
  if (queries < 1 || rows % queries) return ffi::Error::InvalidArgument("each head must have the same queries");
  if (static_cast<int64_t>(used.element_count()) != caches.count ||
      static_cast<int64_t>(seen.element_count()) != caches.count * queries * caches.slots ||
      key.element_count() != value.element_count())
    return ffi::Error::InvalidArgument("keys, values, seen and used must be of the same caches");
  if (rows > kMaxRows) return ffi::Error::InvalidArgument("too many rows");
  const auto run = [&](auto* type) {
    using W = std::remove_pointer_t<decltype(type)>;
    Attend<W>(pool, caches, {query.typed_data(), static_cast<const W*>(key.untyped_data()),
                             static_cast<const W*>(value.untyped_data()), seen.typed_data(), used.typed_data(),
                             output->typed_data(), lse->typed_data(), rows, queries, scale});
    return ffi::Error::Success();
  };
  if (key.element_type() != value.element_type())
    return ffi::Error::InvalidArgument("keys and values must be of the same type");
  if (key.element_type() == ffi::F32) return run(static_cast<float*>(nullptr));
  if (key.element_type() == ffi::BF16) return run(static_cast<BFloat16*>(nullptr));
  if (key.element_type() == ffi::F16) return run(static_cast<Float16*>(nullptr));
  return ffi::Error::InvalidArgument("keys and values must be float32, bfloat16 or float16");
}

ffi::Error RunAttend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> query, ffi::AnyBuffer key, ffi::AnyBuffer value,
                     ffi::Buffer<ffi::PRED> seen, ffi::Buffer<ffi::S32> used, ffi::ResultBuffer<ffi::F32> output,
                     ffi::ResultBuffer<ffi::F32> lse, float scale) {
  return RunAttendOf(pool, query, key, value, Caches(key.dimensions()), seen, used, output, lse, scale);
}

ffi::Error RunIndexedAttend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> query, ffi::AnyBuffer key,
                            ffi::AnyBuffer value, ffi::Buffer<ffi::PRED> seen, ffi::Buffer<ffi::S32> used,
                            ffi::Buffer<ffi::S32> index, ffi::ResultBuffer<ffi::F32> output,
                            ffi::ResultBuffer<ffi::F32> lse, float scale) {
  return RunAttendOf(pool, query, key, value, Caches(key.dimensions(), *index.typed_data()), seen, used, output, lse, scale);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KvjaxAttend, RunAttend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(KvjaxIndexedAttend, RunIndexedAttend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale"));
