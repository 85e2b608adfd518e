// Products of a few rows with a large matrix, y = x W, or with each of a batch of matrices, for CPUs: an XLA custom call
// (jax.ffi).
//
// Such a product is limited by the bandwidth of memory, so that W is read once and in the order in which it lies in
// memory, by a few streams at a time that the processor prefetches. A general matrix product packs W into blocks first,
// which for a few rows takes longer than to multiply.
//
// The order in which the sum of an output is formed depends on the number of inputs alone: the result of a row depends
// neither on the other rows, nor on the number of rows or of threads. Those of the vectors of a cache do not depend on the
// number of its slots either.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "slots.h"
#include "vectors.h"

namespace {

// Columns of y whose sums are kept in the first-level cache.
constexpr int64_t kColumns = 512;
// Sums of different rows are this far apart. A power of two would put them in the same sets of the cache.
constexpr int64_t kStride = kColumns + 16;
// Of one row: the smallest number of inputs of a part, the largest number of parts, and columns at a time.
constexpr int64_t kPart = 128, kMaxParts = 16, kWide = 4096;

// As many products for each thread need not be cut.
constexpr int64_t kEnough = 4;

// Adds x[:, :U] W[:U] to R rows of sums; x has a row stride of `inputs`, W of `outputs`.
template <int R, int U, typename W>
inline void AddInputs(const float* x, int64_t inputs, const W* w, int64_t outputs, float* sums, int64_t columns,
                      bool first) {
  Vector factor[R][U];
  for (int r = 0; r < R; r++) {
    for (int u = 0; u < U; u++) factor[r][u] = Splat(x[r * inputs + u]);
  }
  int64_t n = 0;
  for (; n + kLanes <= columns; n += kLanes) {
    Vector weight[U];
    for (int u = 0; u < U; u++) {
      weight[u] = Load(w + u * outputs + n);
      // One row waits for memory alone, and the processor's own prefetching is enough: on a Zen 5 without this 50 GB/s
      // instead of 43. Eight rows read 28 GB/s with it there, and 18 without.
      if (R > 1) Ahead(w + (u + 2 * U) * outputs + n);
    }
    for (int r = 0; r < R; r++) {
      Vector sum = first ? Vector{} : Load(sums + r * kStride + n);
      for (int u = 0; u < U; u++) sum = Fma(factor[r][u], weight[u], sum);
      *reinterpret_cast<Vector*>(sums + r * kStride + n) = sum;
    }
  }
  for (; n < columns; n++) {
    for (int r = 0; r < R; r++) {
      float sum = first ? 0 : sums[r * kStride + n];
      for (int u = 0; u < U; u++) sum = Fma(x[r * inputs + u], Scalar(w + u * outputs + n), sum);
      sums[r * kStride + n] = sum;
    }
  }
}

// Adds the inputs from `from` to before `to` to sums that begin at input `begin`.
template <int R, int U, typename W>
void AddAllInputs(const float* x, int64_t inputs, const W* w, int64_t outputs, float* sums, int64_t columns,
                  int64_t begin, int64_t from, int64_t to) {
  int64_t k = from;
  for (; k + U <= to; k += U) AddInputs<R, U>(x + k, inputs, w + k * outputs, outputs, sums, columns, k == begin);
  for (; k < to; k++) AddInputs<R, 1>(x + k, inputs, w + k * outputs, outputs, sums, columns, k == begin);
}

// The parts of the inputs whose sums are formed one by one and then added up in their order, for any number of rows.
struct Parts {
  explicit Parts(int64_t inputs) : inputs(inputs), count(std::clamp<int64_t>(inputs / kPart, 1, kMaxParts)) {}
  int64_t begin(int64_t i) const { return inputs * i / count; }
  int64_t inputs, count;
};

// y = x W for one row, W [inputs, outputs]. Each chunk is a part of the inputs, which lies in contiguous memory.
template <typename W>
void OneRow(ffi::ThreadPool& pool, const float* x, const W* w, float* y, int64_t inputs, int64_t outputs) {
  const Parts parts(inputs);
  std::vector<float> sums(parts.count * outputs);
  ForEach(pool, parts.count, [&](int64_t i) {
    const int64_t begin = parts.begin(i), end = parts.begin(i + 1);
    for (int64_t n = 0; n < outputs; n += kWide) {
      float* sum = sums.data() + i * outputs + n;
      AddAllInputs<1, 8>(x, inputs, w + n, outputs, sum, std::min(kWide, outputs - n), begin, begin, end);
    }
  });
  for (int64_t n = 0; n < outputs; n++) {
    float total = sums[n];
    for (int64_t i = 1; i < parts.count; i++) total += sums[i * outputs + n];
    y[n] = total;
  }
}

// y[:, start:end] of y = x W, W [inputs, outputs].
template <typename W>
void Columns(const float* x, const W* w, float* y, int64_t rows, int64_t inputs, int64_t outputs, int64_t start,
             int64_t end) {
  static thread_local float sums[kMaxRows * kStride] __attribute__((aligned(64)));
  const Parts parts(inputs);
  for (int64_t n = start; n < end; n += kColumns) {
    const int64_t columns = std::min(end - n, kColumns);
    for (int64_t i = 0; i < parts.count; i++) {
      const int64_t begin = parts.begin(i), end_of_part = parts.begin(i + 1);
      if (rows == 1) AddAllInputs<1, 16>(x, inputs, w + n, outputs, sums, columns, begin, begin, end_of_part);
      // All rows use a few rows of W before the next ones are read.
      for (int64_t k = begin; rows > 1 && k < end_of_part; k += 4) {
        const int64_t to = std::min<int64_t>(end_of_part, k + 4);
        int64_t b = 0;
        const auto add = [&](auto few) {
          for (; b + few.value <= rows; b += few.value) {
            const float* some = x + b * inputs;
            AddAllInputs<few.value, 4>(some, inputs, w + n, outputs, sums + b * kStride, columns, begin, k, to);
          }
        };
        add(std::integral_constant<int, kRows>{});
        add(std::integral_constant<int, 2>{});
        add(std::integral_constant<int, 1>{});
      }
      for (int64_t b = 0; b < rows; b++) {
        const float* sum = sums + b * kStride;
        float* into = y + b * outputs + n;
        for (int64_t c = 0; c < columns; c++) into[c] = i == 0 ? sum[c] : into[c] + sum[c];
      }
    }
  }
}

template <typename W>
void Products(ffi::ThreadPool& pool, const float* x, const W* w, float* y, int64_t count, int64_t rows,
              int64_t inputs, int64_t outputs, bool transposed) {
  if (count == 1 && rows == 1 && !transposed) return OneRow(pool, x, w, y, inputs, outputs);
  // Each product is cut into chunks of outputs of equal size, at most kColumns wide, unless there are enough products.
  // Multiples of 16, so that no cache line of y is written by two threads.
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const int64_t turns = (outputs + threads * kColumns - 1) / (threads * kColumns);
  const int64_t wanted = count < kEnough * threads ? threads * turns : 1;
  const int64_t width = (outputs + wanted * 16 - 1) / (wanted * 16) * 16;
  const int64_t chunks = (outputs + width - 1) / width;
  ForEach(pool, count * chunks, [&](int64_t i) {
    const int64_t product = i / chunks, start = i % chunks * width, end = std::min(outputs, start + width);
    const bool keys = count > 1 && rows <= kMaxKeyRows && AreKeys(inputs);
    const auto run = !transposed ? Columns<W> : keys ? AnyKeys<W> : Rows<W>;
    run(x + product * rows * inputs, w + product * inputs * outputs, y + product * rows * outputs, rows, inputs,
        outputs, start, end);
  });
}

// x [count, rows, inputs], w [count, inputs, outputs] or, transposed, [count, outputs, inputs]; y [count, rows, outputs].
ffi::Error Run(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w, ffi::ResultBuffer<ffi::F32> y,
               bool transposed) {
  const auto shape = x.dimensions();
  const int64_t count = shape[0], rows = shape[1], inputs = shape[2], outputs = y->dimensions()[2];
  if (y->element_count() == 0) return ffi::Error::Success();
  if (inputs == 0) {
    std::memset(y->typed_data(), 0, y->element_count() * sizeof(float));
    return ffi::Error::Success();
  }
  if (rows > kMaxRows) return ffi::Error::InvalidArgument("too many rows");
  if (w.element_type() == ffi::F32)
    Products(pool, x.typed_data(), w.typed_data<float>(), y->typed_data(), count, rows, inputs, outputs, transposed);
  else if (w.element_type() == ffi::BF16)
    Products(pool, x.typed_data(), static_cast<const BFloat16*>(w.untyped_data()), y->typed_data(), count, rows,
             inputs, outputs, transposed);
  else
    return ffi::Error::InvalidArgument("weights must be float32 or bfloat16");
  return ffi::Error::Success();
}

// The product with one of several matrices of one shape, that of the given index: of a layer, in a loop over layers.
ffi::Error RunIndexed(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> index,
                      ffi::RemainingArgs matrices, ffi::ResultBuffer<ffi::F32> y, bool transposed) {
  const auto w = matrices.get<ffi::AnyBuffer>(*index.typed_data());
  return w.has_value() ? Run(pool, x, *w, y, transposed) : w.error();
}

// Products with the first `used` slots of each of the caches w; the others are not read.
template <typename W>
void SlotProducts(ffi::ThreadPool& pool, const float* x, const W* w, const Caches& caches, const int32_t* used,
                  float* y, int64_t rows, bool transposed) {
  const int64_t count = caches.count, slots = caches.slots, dim = caches.dim;
  // Parts of the same slots whatever the number of threads, whose sums are added up in their order.
  const int64_t parts = (slots + kSlots - 1) / kSlots;
  const auto end = [&](int64_t i) { return std::clamp<int64_t>(used[i], 0, slots); };
  if (transposed) {
    // y [count, rows, slots], 0 for a slot that is not used
    return ForEach(pool, count * parts, [&](int64_t i) {
      const int64_t product = i / parts, start = i % parts * kSlots, stop = std::min(slots, start + kSlots);
      const int64_t live = std::clamp(end(product), start, stop);
      float* own = y + product * rows * slots;
      (AreKeys(dim) ? AnyKeys<W> : Rows<W>)(x + product * rows * dim, w + caches.begin(product), own, rows, dim, slots,
                                            start, live);
      for (int64_t b = 0; b < rows; b++) std::memset(own + b * slots + live, 0, (stop - live) * sizeof(float));
    });
  }
  // y [count, rows, dim]
  const std::unique_ptr<float[]> sums(new float[count * (parts - 1) * rows * dim]);
  const auto sums_of = [&](int64_t product, int64_t part) {
    return part == 0 ? y + product * rows * dim : sums.get() + (product * (parts - 1) + part - 1) * rows * dim;
  };
  ForEach(pool, count * parts, [&](int64_t i) {
    const int64_t product = i / parts, part = i % parts, start = part * kSlots;
    const int64_t live = std::min(end(product), start + kSlots) - start;
    if (live <= 0 && part > 0) return;
    SumOfSlots<W>(x + product * rows * slots + start, slots, w + caches.begin(product) + start * dim, dim,
                  sums_of(product, part), rows, std::max<int64_t>(live, 0));
  });
  for (int64_t product = 0; product < count; product++) {
    float* own = sums_of(product, 0);
    for (int64_t part = 1; part * kSlots < end(product); part++) {
      const float* more = sums_of(product, part);
      for (int64_t i = 0; i < rows * dim; i++) own[i] += more[i];
    }
  }
}

// x [..., rows, slots] and y [..., rows, dim], or, transposed, x [..., rows, dim] and y [..., rows, slots], in the order of
// the caches.
ffi::Error RunSlotsOf(ffi::ThreadPool& pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w, const Caches& caches,
                      ffi::Buffer<ffi::S32> used, ffi::ResultBuffer<ffi::F32> y, bool transposed) {
  const auto shape = x.dimensions();
  const int64_t rows = shape[shape.size() - 2];
  if (!caches.known) return ffi::Error::InvalidArgument("there is no such layer of caches");
  if (static_cast<int64_t>(used.element_count()) != caches.count)
    return ffi::Error::InvalidArgument("used must have a number for each cache");
  if (y->element_count() == 0) return ffi::Error::Success();
  if (caches.slots == 0 || caches.dim == 0) {
    std::memset(y->typed_data(), 0, y->element_count() * sizeof(float));
    return ffi::Error::Success();
  }
  const auto run = [&](const auto* first) {
    SlotProducts(pool, x.typed_data(), first, caches, used.typed_data(), y->typed_data(), rows, transposed);
    return ffi::Error::Success();
  };
  if (w.element_type() == ffi::F32) return run(w.typed_data<float>());
  if (w.element_type() == ffi::BF16) return run(static_cast<const BFloat16*>(w.untyped_data()));
  if (w.element_type() == ffi::F16) return run(static_cast<const Float16*>(w.untyped_data()));
  return ffi::Error::InvalidArgument("a cache must be float32, bfloat16 or float16");
}

ffi::Error RunSlots(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w, ffi::Buffer<ffi::S32> used,
                    ffi::ResultBuffer<ffi::F32> y, bool transposed) {
  return RunSlotsOf(pool, x, w, Caches(w.dimensions()), used, y, transposed);
}

ffi::Error RunIndexedSlots(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w,
                           ffi::Buffer<ffi::S32> used, ffi::Buffer<ffi::S32> index, ffi::ResultBuffer<ffi::F32> y,
                           bool transposed) {
  return RunSlotsOf(pool, x, w, Caches(w.dimensions(), *index.typed_data()), used, y, transposed);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KvjaxSlots, RunSlots,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("transposed"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(KvjaxProduct, Run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("transposed"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(KvjaxIndexedProduct, RunIndexed,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("transposed"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(KvjaxIndexedSlots, RunIndexedSlots,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("transposed"));
