// Kernel parameters: plain structs that the host fills and the device reads.
//
// This is the one header that both compilers see (the host's C++ compiler and NVRTC), so it holds
// built-in types only. The static_asserts at the end are evaluated on both sides: a layout
// difference is a compile error and not a wrong answer.
#pragma once

namespace memeff {

// Which of an array's own elements each of the batch reads, or adds to: (batch index / divisor) %
// elements.
// Both are in `fraction`, what one batch index is of a period of divisor * elements
// (core/common.cuh).
struct BatchBroadcast {
  unsigned long long fraction;  // 2^64 / (divisor * elements), rounded up; 0 of a period of 1
  unsigned long long elements;
};

// A [batch, sequence, head, dim] tensor whose innermost dimension is contiguous.
// Strides count elements; they are 64 bits wide because sizes may pass 2^31.
struct TensorView {
  void* data;
  long long batch_stride;
  long long row_stride;
  long long head_stride;
  BatchBroadcast share;
};

// An array that broadcasts to the scores [B, N, T, S]; the stride of a broadcast dimension is 0.
struct ScoreView {
  void* data;
  long long batch_stride;
  long long head_stride;
  long long row_stride;
  long long column_stride;
  BatchBroadcast share;
};

// Sizes of one call, named as in the documentation: query [B, T, N, H], key [B, S, K, H],
// value [B, S, K, Hv].
//
// Packed sequences stand one after the other in query [1, tokens, N, H], key and value; B counts
// them, T and S are the longest that there may be. Sequence b begins at token starts[b] and has
// the lengths of MaskParams. What lies between its end and starts[b + 1] belongs to no sequence;
// starts[B] is starts[0] + tokens, so that the last of these gaps goes on at token 0.
struct ProblemShape {
  int batch;         // B
  int query_length;  // T
  int key_length;    // S
  int query_heads;   // N
  int key_heads;     // K, divides N
  int head_dim;      // H
  int value_dim;     // Hv
  int group;         // N / K
  int query_tokens;  // of packed sequences; 0 where there are none
  int key_tokens;
  const int* query_starts;  // [B + 1] or null
  const int* key_starts;
};

// How a score becomes an exponent of two.
//   without soft cap: x = score * prescale;  p = exp2(x * softmax_scale - lse2)
//   with soft cap:    x = tanh(score * prescale), otherwise the same
//   with a bias:      x as above, then x += bias * bias_scale
// prescale is 1 for positive scales without soft cap, which costs nothing. A scale <= 0 goes into
// prescale, because the running maximum is taken of x and needs softmax_scale > 0; so does a tiny
// one, which would make bias_scale large.
struct ScoreScale {
  float prescale;
  float softmax_scale;   // of log2(e), times scale or the soft cap
  float gradient_scale;  // d(score)/d(query.key): the user's scale
  float bias_scale;      // log2(e) / softmax_scale
};

// Windows hold one bound each way and alignment, kUnbounded when there is none. Top-left windows
// count from the diagonal s == t, bottom-right ones from s == t + (key length - query length).
struct MaskParams {
  int top_left_left;
  int top_left_right;
  int bottom_right_left;
  int bottom_right_right;
  const int* query_lengths;   // [B] or null
  const int* key_lengths;     // [B] or null
  const int* query_position;  // [B] or null: global index of row 0
  const int* key_position;    // [B] or null: global index of column 0
  const int* query_segments;  // [B, segment_pairs, T], or [segment_pairs, tokens]
  const int* key_segments;    // [B, segment_pairs, S], or [segment_pairs, tokens]
  long long segment_pairs;
  ScoreView boolean;  // one byte an element
};

// Which tiles segment ids and a boolean mask leave something of: see mask/block_mask.cuh.
struct BlockMask {
  const void* data;
  int batch_rows;  // from one batch element to the next; 0 where all have the same
  int head_rows;
};

// What the keep bit of an element depends on beside its row and column: see score/dropout.cuh.
struct DropoutParams {
  const unsigned* key_words;   // [B, 2]
  const unsigned* batch_base;  // [B]
  const unsigned* head_index;  // [N]
  int threshold;               // T: an element is kept where its random byte is >= T
  float scale;                 // 256 / (256 - T), of what is kept
};

constexpr int kUnbounded = 1 << 30;
constexpr int kMaxLength = 1 << 28;  // largest T and S

constexpr int kLongSumColumns = 8192;  // that tensor cores sum precisely enough for the logsumexp

constexpr int kF16x3Rows =
    64;  // that a CTA of kernels/forward/f16x3_split.cuh writes; divides tiles

// The pieces of a persistent kernel that no CTA has begun with (schedule/persistent.cuh).
struct TileCounter {
  unsigned long long ready;
  int next;
  int finished;
};

struct ForwardParams {
  ProblemShape shape;
  ScoreScale scale;
  MaskParams mask;
  DropoutParams dropout;
  ScoreView bias;
  TensorView query;
  TensorView key;
  TensorView value;
  TensorView out;
  float* logsumexp;           // [B, N, T] or [N, tokens], natural logarithm
  float* partial_logsumexp;   // [splits, B, heads of tiles, rows], see schedule/key_splits.cuh
  float* partial_out;         // the same rows, [value dim class] each
  int splits;                 // of the keys; 1: no partial results
  TileCounter* tile_counter;  // of persistent kernels
  float* out_sum;             // of wide kernels: [B, N, padded T, padded Hv], in the order of
                              // collective/chunked_product.cuh
  float* score_sum;  // of wide kernels where H > kLongSumColumns: a tile of scores for each
                     // of queries; see collective/long_sum.cuh
  BlockMask block_mask;
  char* query_hi_lo;  // of f32 in f16 products: see layout/f16x3_tiles.cuh
  char* key_hi_lo;
  char* value_hi_lo;
};

struct BackwardParams {
  ProblemShape shape;
  ScoreScale scale;
  MaskParams mask;
  DropoutParams dropout;
  ScoreView bias;
  TensorView query;
  TensorView key;
  TensorView value;
  TensorView out;
  TensorView out_gradient;
  TensorView query_gradient;
  TensorView key_gradient;
  TensorView value_gradient;
  const float* logsumexp;           // [B, N, T] or [N, tokens]
  const float* logsumexp_gradient;  // the same, or null
  float* row_statistics;            // [tiles, query tile, 2], see layout/row_statistics.cuh:
                                    // logsumexp in base 2 (+inf where a row has no keys), and
                                    // delta = rowsum(dO * O) - dlse
  float* query_gradient_sum;        // [tiles, query tile, head dim class], in fragment order
  float* key_gradient_sum;          // of shared tiles: see schedule/split_q.cuh
                                    // of wide kernels: [B, K, padded S, padded H] and
  float* value_gradient_sum;        // [B, K, padded S, padded Hv]
  ScoreView bias_gradient;
  float* bias_gradient_sum;  // where it is summed: see score/bias/gradient.cuh
  int query_tiles;           // padded T / query tile
  int q_splits;              // CTAs for each tile of keys: see schedule/split_q.cuh
  int* semaphores;  // of sums that are the same in every run: see schedule/dq_semaphore.cuh and
                    // schedule/split_q.cuh
  BlockMask block_mask;  // of the kernel that is launched
};

// An array that a feature brings: a kernel finds it at a fixed index of its ArrayTable, which the
// source that the code generator emits states. Sizes and strides are those of the array's own dims,
// outermost first; those behind its last dim are 0.
struct ArrayView {
  static constexpr int kMostDims = 4;

  void* data;
  long long sizes[kMostDims];
  long long strides[kMostDims];  // in elements; 0 for a dim of one element
  BatchBroadcast share;          // of the first dim
};

constexpr int kMostArrays = 16;

struct ArrayTable {
  ArrayView arrays[kMostArrays];
};

// The first parameter of kernels that have such arrays. Device code passes it on as Params, and
// core/feature_arrays.cuh finds the table behind them. The host passes it to every kernel: one
// that declares Params copies these only.
template <class Params>
struct WithArrays : Params {
  ArrayTable table;
};

// A CUtensorMap: how the tensor memory accelerator sees a tensor. The launcher encodes it.
struct alignas(128) TensorMap {
  unsigned long long opaque[16];
};

// The tensor maps of a forward kernel that uses them, in the order of its spec, which may leave the
// last kOptional out.
struct ForwardMaps {
  TensorMap query;
  TensorMap key;
  TensorMap value;
  static constexpr int kOptional = 0;
};

// The same of a backward kernel. Those of gradients that nobody asked for are zero.
struct BackwardMaps {
  TensorMap query;
  TensorMap key;
  TensorMap value;
  TensorMap out_gradient;
  TensorMap query_gradient;  // where it is written at once
  TensorMap key_gradient;
  TensorMap value_gradient;
  TensorMap bias;  // of kernels that read it through the copy engine
  static constexpr int kOptional = 1;
};

static_assert(sizeof(TensorView) == 48, "host and device disagree on TensorView");
static_assert(sizeof(ScoreView) == 56, "host and device disagree on ScoreView");
static_assert(sizeof(ProblemShape) == 56, "host and device disagree on ProblemShape");
static_assert(sizeof(MaskParams) == 128, "host and device disagree on MaskParams");
static_assert(sizeof(BlockMask) == 16, "host and device disagree on BlockMask");
static_assert(sizeof(DropoutParams) == 32, "host and device disagree on DropoutParams");
static_assert(sizeof(TileCounter) == 16, "host and device disagree on TileCounter");
static_assert(sizeof(ForwardParams) == 576, "host and device disagree on ForwardParams");
static_assert(sizeof(BackwardParams) == 816, "host and device disagree on BackwardParams");
static_assert(sizeof(ArrayView) == 88, "host and device disagree on ArrayView");
static_assert(sizeof(ArrayTable) == 1408, "host and device disagree on ArrayTable");
static_assert(sizeof(WithArrays<ForwardParams>) == 1984, "host and device disagree on WithArrays");
static_assert(sizeof(WithArrays<BackwardParams>) == 2224, "host and device disagree on WithArrays");
static_assert(sizeof(TensorMap) == 128, "host and device disagree on TensorMap");

}  // namespace memeff
