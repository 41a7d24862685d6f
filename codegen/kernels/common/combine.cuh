// Runs after a forward whose keys were split: out = sum of exp(lse_split - lse) * out_split.
#pragma once

#include <cute/algorithm/clear.hpp>
#include <cute/tensor_impl.hpp>

#include <memeff/arch/barrier.cuh>
#include <memeff/core/math.cuh>
#include <memeff/layout/gqa_rows.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/mask/interval.cuh>
#include <memeff/score/row_modifiers.cuh>

namespace memeff {

// Sums of partial results over disjoint sets of keys: weighted by exp(logsumexp), normalized last.
//
// Batch-invariant calls sum keys in segments that begin at absolute multiples of kSegmentKeys. A
// CTA that has all segments of a row adds them up in registers. If the segments are divided over
// CTAs, the combine kernel adds them up. Both add in ascending order with the functions below, so
// their bits are equal. Hazard: the multiply-adds are explicit, because the compiler may contract
// the same expression differently in two kernels.

// The factors of a sum of outputs and of an output that is added to it.
struct SumFactors {
  float own;
  float other;

  CUTE_DEVICE float add(float sum, float output) const { return fmaf(own, sum, other * output); }
};

// The sum of the weights of a row, relative to exp(maximum). Adding a part without keys, whose
// logsumexp is -inf, changes no bit.
struct WeightSum {
  float maximum;
  float weight;

  CUTE_DEVICE static WeightSum empty() { return {-infinity(), 0.0f}; }

  CUTE_DEVICE SumFactors add(float other_maximum, float other_weight) {
    float const largest = fmaxf(maximum, other_maximum);
    float const reference = largest == -infinity() ? 0.0f : largest;
    SumFactors const factors = {exp2_approx((maximum - reference) * kLog2e),
                                exp2_approx((other_maximum - reference) * kLog2e)};
    weight = factors.add(weight, other_weight);
    maximum = largest;
    return factors;
  }

  CUTE_DEVICE RowEnd end() const {
    if (weight == 0.0f) return RowEnd::empty();
    return {1.0f / weight, fmaf(log2_approx(weight), kLn2, maximum), -infinity()};
  }
};

// The sum of the outputs of a CTA's segments; FmhaForwardSplitSm80 adds each segment. `Output` is
// (4, MMA_M, MMA_N).
template <class Output>
struct SegmentSum {
  static constexpr int kRows = 2 * cute::size<1>(Output{});

  Output output;
  WeightSum rows[kRows];

  CUTE_DEVICE SegmentSum() {
    cute::clear(output);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) rows[r] = WeightSum::empty();
  }

  // Adds the normalized output of a segment.
  CUTE_DEVICE void add(Output const& other, float const (&logsumexps)[kRows]) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      SumFactors const factors = rows[r].add(logsumexps[r], 1.0f);
      for_row(r, [&](int i, int m, int n) {
        output(i, m, n) = factors.add(output(i, m, n), other(i, m, n));
      });
    }
  }

  // Normalizes the output and writes the logsumexps, both after the LaneRowModifiers `modifiers`.
  template <class Modifiers>
  CUTE_DEVICE void finish(float (&logsumexps)[kRows], Modifiers const& modifiers) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      RowEnd const end = modifiers.finish(r, rows[r].end());
      logsumexps[r] = end.logsumexp;
      for_row(r, [&](int i, int m, int n) { output(i, m, n) *= end.factor; });
    }
  }

 private:
  template <class Use>
  CUTE_DEVICE static void for_row(int r, Use use) {
    CUTE_UNROLL
    for (int n = 0; n < cute::size<2>(Output{}); ++n) {
      use(2 * (r % 2), r / 2, n);
      use(2 * (r % 2) + 1, r / 2, n);
    }
  }
};

// Adjacent columns of a row of f32 outputs.
template <int kCount>
struct OutputColumns {
  static_assert(kCount == 2 || kCount == 4);
  using Vector = cute::conditional_t<kCount == 4, float4, float2>;
  using Pairs = cute::conditional_t<kCount == 4, uint2, uint32_t>;

  alignas(Vector) float values[kCount];

  CUTE_DEVICE void load(float const* source) {
    *reinterpret_cast<Vector*>(values) = *reinterpret_cast<Vector const*>(source);
  }

  // Stores the columns times `factor`, as elements of 16 bits.
  template <class Element>
  CUTE_DEVICE void store(char* target, float factor) const {
    alignas(Pairs) uint32_t pairs[kCount / 2];
    CUTE_UNROLL
    for (int i = 0; i < kCount / 2; ++i) {
      pairs[i] = pack<Element>(values[2 * i] * factor, values[2 * i + 1] * factor);
    }
    *reinterpret_cast<Pairs*>(target) = *reinterpret_cast<Pairs const*>(pairs);
  }
};

// A sum of weighted outputs, and of the weights.
template <int kCount>
struct PartialSum {
  using Columns = OutputColumns<kCount>;

  Columns out;
  WeightSum weights;

  CUTE_DEVICE static PartialSum empty() { return {{}, WeightSum::empty()}; }

  CUTE_DEVICE void add(Columns const& other, float other_maximum, float other_weight) {
    SumFactors const factors = weights.add(other_maximum, other_weight);
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) out.values[i] = factors.add(out.values[i], other.values[i]);
  }
};

// The combine kernel of the split forward. A CTA combines one or several rows.
template <class Config>
struct FmhaForwardCombine {
  using Element = typename Config::Element;
  using Rows = GqaRows<Config::kPackGqa>;
  static constexpr int kThreads = 128;

  // If a row has many splits, several sets of threads divide them. One set adds up all segments,
  // because their order matters. With hundreds of segments the latency of loads determines the
  // time, so each thread has fewer columns and more loads in flight.
  static constexpr bool kKeySegments = Config::kSegmentKeys > 0;
  static constexpr int kBlocksPerSm = kKeySegments ? 3 : 8;
  static constexpr int kColumns = kKeySegments ? 2 : 4;  // of a thread
  static constexpr int kUnroll = kKeySegments ? 32 : 4;
  static constexpr int kColumnThreads = Config::kValueDim / kColumns;
  static constexpr int kSets = kThreads / kColumnThreads;
  static_assert(kSets > 0);
  using Sum = PartialSum<kColumns>;

  CUTE_DEVICE static void run(ForwardParams const& params) {
    long long const rows = partial_rows(params.shape);
    int const row_sets = kKeySegments ? 1 : min(params.splits, kSets);
    int const block_rows = kSets / row_sets;
    long long const step = (long long)gridDim.x * block_rows;
    for (long long first = (long long)blockIdx.x * block_rows; first < rows; first += step) {
      combine(params, first, int(min((long long)block_rows, rows - first)), row_sets);
    }
  }

 private:
  // Combines the rows [first, first + count), each with row_sets sets of threads.
  CUTE_DEVICE static void combine(ForwardParams const& params, long long first, int count,
                                  int row_sets) {
    auto& sums = static_shared<Sum[kSets][kColumnThreads]>();
    int const set = threadIdx.x / kColumnThreads;
    int const column_thread = threadIdx.x % kColumnThreads;
    long long const row = first + set / row_sets;
    // In a mixed batch most sequences have fewer queries than rows. Other calls do not wait for the
    // lengths before they load partial results.
    bool const skips = Config::kPacked && params.keeps_gaps;
    bool const active = set / row_sets < count && !(skips && !position(params, row).valid);
    Sum sum = Sum::empty();
    if (active) {
      int const parts = kKeySegments ? segments(params, row) : params.splits;
#pragma unroll kUnroll
      for (int split = set % row_sets; split < parts; split += row_sets) {
        long long const index = split * partial_rows(params.shape) + row;
        float const logsumexp = params.partial_logsumexp[index];
        float const* const out =
            params.partial_out + index * Config::kValueDim + kColumns * column_thread;
        typename Sum::Columns part;
        part.load(out);
        // The output of a masked segment is uninitialized. It is loaded and discarded, because a
        // branch around the load would make the loads of all segments wait for each other.
        bool const is_written = !kKeySegments || logsumexp != -infinity();
        if (!is_written) part = {};
        sum.add(part, logsumexp, 1.0f);
      }
      sums[set][column_thread] = sum;
    }
    sync_threads();
    if (active && set % row_sets == 0) {
      for (int other = 1; other < row_sets; ++other) {
        Sum const& found = sums[set + other][column_thread];
        sum.add(found.out, found.weights.maximum, found.weights.weight);
      }
      store(params, row, kColumns * column_thread, sum);
    }
    sync_threads();  // every thread has read the sums
  }

  // The number of segments of the sequence of a row.
  CUTE_DEVICE static int segments(ForwardParams const& params, long long partial_row) {
    ProblemShape const& shape = params.shape;
    int const batch = int(partial_row / ((long long)shape.query_heads * shape.query_length));
    int const keys = IntervalMask<MaskKind::none>(params.mask, shape, batch).key_length;
    return ceil_div(keys, Config::kSegmentKeys);
  }

  CUTE_DEVICE static RowPosition position(ForwardParams const& params, long long partial_row) {
    ProblemShape const& shape = params.shape;
    Rows const rows(shape);
    int const row_count = rows.count(shape.query_length);
    int const row = int(partial_row % row_count);
    int const tile_heads = shape.query_heads / rows.heads;
    int const head_batch = int(partial_row / row_count);
    int const batch = head_batch / tile_heads;
    int const query = rows.query(row);
    int const head = rows.query_head(head_batch % tile_heads, row);
    int const query_length = IntervalMask<MaskKind::none>(params.mask, shape, batch).query_length;
    return {batch, head, query, query < query_length};
  }

  // Finishes a row with its modifiers and writes a thread's columns of it.
  CUTE_DEVICE static void store(ForwardParams const& params, long long partial_row, int column,
                                Sum const& sum) {
    ProblemShape const& shape = params.shape;
    RowPosition const at = position(params, partial_row);
    if (Config::kPacked && !at.valid) return;  // a row of another sequence
    Origin const origin = query_origin<Config>(shape, at.batch);
    RowModifiers<Config> const modifiers(params, at);
    auto const end = [&] { return modifiers.finish(sum.weights.end()); };
    if (column == 0) {
      params.logsumexp[logsumexp_offset<Config>(shape, origin, at.head) + at.query] =
          end().logsumexp;
    }
    if (column < shape.value_dim) {
      float const scale = end().factor;
      char* const out =
          row_pointer<Element>(params.out, origin.batch, origin.row + at.query, at.head);
      sum.out.template store<Element>(out + column * sizeof(Element), scale);
    }
  }
};

}  // namespace memeff
