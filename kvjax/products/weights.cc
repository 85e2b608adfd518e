// Products of a few rows with weights that are held as codes, for CPUs: XLA custom calls (jax.ffi). Codes are read once
// and become numbers in registers; no decoded matrix is ever written.
//
// Weights [in, out] are grouped along the inputs, number = scale * (code - zero), with a scale and a zero of each output
// for every group. The product of a row x with a group is scale * (sum_i x_i * code_i - zero * sum_i x_i).
//
// Sums are formed in an order that depends on the shape of the matrix alone: a row's result depends neither on other
// rows, nor on the number of threads.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "levels.h"
#include "vectors.h"

namespace {

// Registers of columns that R rows of x add up: half of all registers are sums.
template <int R>
constexpr int kColumns = (kLanes == 16 ? 16 : 8) / R;
// Floats of the sums of rows of x times columns of a strip: they stay in the first-level cache.
constexpr int64_t kMaxSums = 4096;
constexpr int64_t kStrip = kMaxSums / kRows;
// Columns of the narrowest strip, whose width is a multiple of it.
constexpr int64_t kMinStrip = 32;

// Weights [in, out]: groups of `group` inputs, with places * byte_rows codes each.
struct Weights {
  int64_t inputs, outputs, groups, byte_rows;
};

// The order in which the codes of a group are read.
struct Order {
  int64_t strip;     // columns that a thread takes at a time
  int64_t together;  // rows of codes that are read from left to right before those below them
  int64_t ahead;     // rows of codes that are fetched ahead
};

// Without AVX-512, wide matrices are read four rows of codes at a time. Otherwise all rows of a group are read at once, and
// sums stay in registers: with AVX-512 those of all columns of a strip, else those of one cache line of codes. The lines
// of 32 rows of an output head share a set of the cache, and each lies on a page of its own: the head of SmolLM2, 576 rows
// of 49,152 bytes, took 7.2 ms so for one row of x and 17 for 8, and takes 3.2 and 10 four rows at a time (two cores of an
// EPYC of family 25; vectors of 4 lanes were not timed). Matrices of 576 and 1,536 columns gain nothing, and lose with 8.
Order OrderOf(const Weights& of, int64_t rows, int64_t threads) {
  constexpr int64_t wide = 4096;
  if (kLanes == 16 || of.outputs <= wide) return {256, of.byte_rows, 32};
  const int64_t most = rows == 1 ? kMaxSums : rows < kRows ? kMaxSums / 2 : kStrip;
  const int64_t strips = (of.outputs + most * threads - 1) / (most * threads) * threads;
  const int64_t columns = (of.outputs + strips - 1) / strips;
  return {(columns + kMinStrip - 1) / kMinStrip * kMinStrip, std::min<int64_t>(4, of.byte_rows), 8};
}

// The sums of a thread: of all groups so far, [rows, strip], and of a part of the rows of a group, [R, kMaxSums / R].
struct StripSums {
  float all[kMaxRows * kStrip] __attribute__((aligned(64)));
  float group[kMaxSums] __attribute__((aligned(64)));
};
// The same memory for every kind of codes: in a template, each kind would have its own.
StripSums& ThreadSums() {
  static thread_local StripSums sums;
  return sums;
}
static_assert(kStrip * kRows == kMaxSums && kStrip % kMinStrip == 0 && kMaxRows * kStrip >= 3 * kMaxSums / 2);

// Adds R rows of x times the rows of codes of one group from `from` on that are read together, for N registers of columns
// from n on: to sums [R, kMaxSums / R], and, with the last rows of the group, to y, whose rows are a strip long.
template <int R, int N, bool Whole, class L, typename Z>
inline void AddRows(const L& levels, const Weights& of, const float* x, const float* totals, const uint8_t* codes,
                    const float* scale, const Z* zero, float* sums, float* y, const Order& order, int64_t n, int64_t from) {
  constexpr int P = L::kPlaces;
  const int64_t rest = of.outputs - n, to = std::min(of.byte_rows, from + order.together);
  const auto read = [&](const uint8_t* p) { return Whole ? LoadBytes(p) : LoadBytes(p, rest); };
  // Scales and zeros of the next group, which no row of codes asks for.
  for (int k = 0; k < N && from == 0; k++) {
    const int64_t next = of.outputs + n + k * kLanes;
    Ahead(scale + next);
    if (std::is_same_v<Z, float> || k % (64 / kLanes) == 0) Ahead(zero + next);
  }
  Vector sum[R][N] = {};
  const auto each = [&](auto run) {
    for (int r = 0; r < R; r++)
      for (int k = 0; k < N; k++) run(sums + r * (kMaxSums / R) + k * kLanes, sum[r][k]);
  };
  if (from > 0) each([](const float* p, Vector& v) { v = Load(p); });
  for (int64_t j = from; j < to; j++) {
    const uint8_t* row = codes + j * of.outputs + n;
    for (int k = 0; k < N; k += 64 / kLanes) Ahead(row + order.ahead * of.outputs + k * kLanes);
    for (int k = 0; k < N; k++) {
      Vector v[P];
      levels.Read(read(row + k * kLanes), v);
      for (int p = 0; p < P; p++)
        for (int r = 0; r < R; r++) sum[r][k] = Fma(Splat(x[r * of.inputs + p * of.byte_rows + j]), v[p], sum[r][k]);
    }
  }
  if (to < of.byte_rows) return each([](float* p, Vector v) { Store(p, v); });
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
      float* into = y + r * order.strip + k * kLanes;
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
  const Order order = OrderOf(of, rows, std::max<int64_t>(pool.num_threads(), 1));
  ForEach(pool, (of.outputs + order.strip - 1) / order.strip, [&](int64_t strip) {
    const int64_t start = strip * order.strip, columns = std::min(order.strip, of.outputs - start);
    auto& [own, sums] = ThreadSums();
    std::fill_n(own, rows * order.strip, 0.0f);
    for (int64_t g = 0; g < of.groups; g++) {
      OfRows(rows, [&](int64_t r, auto count) {
        constexpr int R = count.value;
        for (int64_t from = 0; from < of.byte_rows; from += order.together) {
          const auto add = [&](auto registers, auto whole, int64_t n) {
            AddRows<R, registers.value, whole.value>(
                levels, of, x + r * of.inputs + g * group, totals.data() + r * of.groups + g,
                codes + g * of.byte_rows * of.outputs, scale + g * of.outputs, zero + g * of.outputs, sums + n,
                own + r * order.strip + n, order, start + n, from);
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
        }
      });
    }
    for (int64_t r = 0; r < rows; r++) std::memcpy(y + r * of.outputs + start, own + r * order.strip, columns * sizeof(float));
  });
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
