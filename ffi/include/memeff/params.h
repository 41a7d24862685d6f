// Kernel parameters: plain structs that the host fills and the device reads.
//
// This is the only header that both the host compiler and NVRTC compile, so it uses built-in types
// only. Both evaluate the static_asserts at the end: a difference in layout is a compile error
// instead of a wrong result.
#pragma once

namespace memeff {

// Maps a batch index of the call to a batch index of an array that a vmap broadcasts:
// (batch index / divisor) % elements. `fraction` encodes both as the share of one batch index in a
// period of divisor * elements (core/common.cuh).
struct BatchBroadcast {
  unsigned long long fraction;  // 2^64 / (divisor * elements), rounded up; 0 for a period of 1
  unsigned long long elements;
};

// A [batch, sequence, head, dim] tensor whose innermost dimension is contiguous.
// Strides count elements, in 64 bits because sizes may exceed 2^31.
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

// A boolean array that broadcasts to the scores, one bit per element: each row has words of 32
// columns, the first one in the lowest bit, and is never broadcast over columns.
struct BitView {
  const unsigned* words;
  long long batch_stride;
  long long head_stride;
  long long row_stride;
  bool rows_are_tokens;  // of packed sequences
  BatchBroadcast share;
};

// Sizes of one call, named as in the documentation: query [B, T, N, H], key [B, S, K, H],
// value [B, S, K, Hv].
//
// Packed sequences are consecutive in query [1, tokens, N, H], key and value. B is their number, T
// and S are upper bounds of their lengths. Sequence b begins at token starts[b] and has the lengths
// of MaskParams. Tokens between its end and starts[b + 1] belong to no sequence. starts[B] is
// starts[0] + tokens, so the last of these gaps wraps around to token 0.
struct ProblemShape {
  int batch;         // B
  int query_length;  // T
  int key_length;    // S
  int query_heads;   // N
  int key_heads;     // K, divides N
  int head_dim;      // H
  int value_dim;     // Hv
  int group;         // N / K
  int query_tokens;  // of packed sequences, else 0
  int key_tokens;
  const int* query_starts;  // [B + 1] or null
  const int* key_starts;
};

// Converts a score to an exponent of two.
//   without soft cap: x = score * prescale;  p = exp2(x * softmax_scale - lse2)
//   with soft cap:    x = tanh(score * prescale), otherwise the same
//   with a bias:      x as above, then x += bias * bias_scale
// prescale is 1, at no cost, for positive scales without soft cap. A scale <= 0 becomes part of
// prescale, because the running maximum is that of x and needs softmax_scale > 0. So does a tiny
// scale, which would make bias_scale large.
struct ScoreScale {
  float prescale;
  float softmax_scale;   // log2(e) times scale or the soft cap
  float gradient_scale;  // d(score)/d(query.key): the user's scale
  float bias_scale;      // log2(e) / softmax_scale
};

// Windows have one bound for each side and alignment, kUnbounded if there is none. Top-left windows
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
  BitView boolean;
};

// Which tiles have valid elements under segment ids, boolean masks and mask functions: see
// mask/block_mask.cuh.
struct BlockMask {
  const void* data;
  int batch_rows;  // from one batch index to the next; 0 if all have the same rows
  int head_rows;
};

// The inputs of an element's keep bit other than its row and column: see score/dropout.cuh.
struct DropoutParams {
  const unsigned* key_words;   // [B, 2]
  const unsigned* batch_base;  // [B]
  const unsigned* head_index;  // [N]
  int threshold;               // T: an element is kept if its random byte is >= T
  float scale;                 // 256 / (256 - T), the factor of kept elements
};

constexpr int kUnbounded = 1 << 30;
constexpr int kNoGap = -kUnbounded;  // instead of a query length: see layout/sequences.cuh
constexpr int kMaxLength = 1 << 28;  // largest T and S

// The most columns that tensor cores sum precisely enough for the logsumexp.
constexpr int kLongSumColumns = 8192;

// The rows that a CTA of a 3xFP16 split kernel writes. Divides every tile.
constexpr int kF16x3Rows = 64;

// The tile counter of a persistent kernel's scheduler (schedule/persistent.cuh).
struct TileCounter {
  unsigned long long ready;
  int next;
  int finished;
};

// The slots of the partial results of a row tile of a latent forward (schedule/balanced_keys.cuh).
// A count of 1 means that there are none. CTA i has slots 2 i and 2 i + 1, for the last and for the
// first KV blocks of a row tile. In a batch-invariant call it has slot i for its running sum, and
// the others are for segments.
struct TileParts {
  int count;
  int first_slot;
  int second_slot;
  int step;  // from the second slot to the third, and so on
};

// The first parameter of every forward kernel. ffi/src/launch.cc fills it.
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
  float* partial_logsumexp;   // [splits, B, heads of tiles, rows], see schedule/key_splits.cuh;
                              // latent calls: see schedule/balanced_keys.cuh
  float* partial_out;         // the same rows, [padded value dim] each
  int splits;                 // of the keys; 1 means no partial results; latent calls: the number
                              // of slots in partial_out
  bool keeps_gaps;            // tokens of no sequence keep their results
  bool marks_empty;           // some query lengths are kNoGap
  TileCounter* tile_counter;  // of persistent kernels
  float* out_sum;             // large head dims: [B, N, padded T, padded Hv], in the order of
                              // collective/chunked_product.cuh
  float* score_sum;           // H > kLongSumColumns: a tile of scores for each tile of queries; see
                              // sm80/large_dim_forward.cuh
  BlockMask block_mask;
  char* query_hi_lo;  // 3xFP16: see layout/f16x3_tiles.cuh
  char* key_hi_lo;
  char* value_hi_lo;
  TileParts* tile_parts;  // [B, K, row tiles], see schedule/balanced_keys.cuh
};

// The first parameter of every tangent kernel. ffi/src/launch.cc fills it. `out` and `logsumexp`
// are the results of the forward, which the kernel reads. A tangent that is zero has no data.
struct TangentParams : ForwardParams {
  TensorView query_tangent;  // with all batch indices, although a vmap may broadcast the operand
  TensorView key_tangent;
  TensorView value_tangent;
  TensorView out_tangent;
  float* logsumexp_tangent;  // [B, N, T] or [N, tokens]
};

// The first parameter of every backward kernel. ffi/src/launch.cc fills it.
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
  float* row_statistics;            // [tiles, query tile, 2], see layout/backward_workspaces.cuh:
                                    // logsumexp in base 2 (+inf if a row has no keys), and
                                    // delta = rowsum(dO * O) - dlse
  float* query_gradient_sum;        // [tiles, query tile, padded head dim], in fragment order
  int* query_gradient_states;       // [tiles], see common/dq_sums.cuh
  float* key_gradient_sum;          // split-Q: see schedule/split_q.cuh
                                    // latent calls: see KeyGradientSums of
                                    // codegen/kernels/sm90/latent_backward.cuh;
                                    // large head dims: [B, K, padded S, padded H] and
  float* value_gradient_sum;        // [B, K, padded S, padded Hv]
  ScoreView bias_gradient;
  float* bias_gradient_sum;  // if it is summed: see score/bias/gradient.cuh
  int query_tiles;           // padded T / query tile
  int head_splits;           // CTAs that divide the query heads of a KV block; shape.key_heads is
                             // K times this
  int row_splits;            // CTAs that divide its Q blocks: see schedule/split_q.cuh
  int* semaphores;           // see schedule/dq_semaphore.cuh, schedule/split_q.cuh and
                             // common/dq_sums.cuh
  BlockMask block_mask;      // of the launched kernel
  char* query_hi_lo;         // 3xFP16: see layout/f16x3_tiles.cuh
  char* key_hi_lo;
  char* value_hi_lo;
  char* out_gradient_hi_lo;
};

// An array of a feature. The generated source has its index in the ArrayTable. Sizes and strides
// are those of the array's own dims, outermost first, followed by zeros.
struct ArrayView {
  static constexpr int kMostDims = 6;

  void* data;
  long long sizes[kMostDims];
  long long strides[kMostDims];  // in elements; 0 for a dim of one element
  BatchBroadcast share;          // of the first dim
};

constexpr int kMostArrays = 16;

// The arrays of features, in the order of the spec's captured arrays.
struct ArrayTable {
  ArrayView arrays[kMostArrays];
};

// The first parameter of kernels with such arrays. Device code passes it on as Params, and
// core/common.cuh finds the table after them. The host passes it to every kernel; a kernel
// that declares Params receives only the fields before the table.
template <class Params>
struct WithArrays : Params {
  ArrayTable table;
};

// A CUtensorMap: the description of a tensor for TMA. The launcher encodes it.
struct alignas(128) TensorMap {
  unsigned long long opaque[16];
};

// The tensor maps of a forward kernel that uses TMA, in the order of its spec, which may omit the
// last kOptional.
struct ForwardMaps {
  TensorMap query;
  TensorMap key;
  TensorMap value;
  static constexpr int kOptional = 0;
};

// The tensor maps of a tangent kernel. The maps of tangents that are zero are zero.
struct TangentMaps : ForwardMaps {
  TensorMap query_tangent;
  TensorMap key_tangent;
  TensorMap value_tangent;
};

// The only tensor map of a kernel whose values are columns of the keys.
struct KeyMap {
  TensorMap key;
  static constexpr int kOptional = 0;
};

// The tensor maps of a backward kernel. The maps of gradients that are not needed are zero.
struct BackwardMaps {
  TensorMap query;
  TensorMap key;
  TensorMap value;
  TensorMap out_gradient;
  TensorMap query_gradient;  // if it is written without sums
  TensorMap key_gradient;
  TensorMap value_gradient;
  TensorMap bias;  // if the kernel reads it by TMA
  static constexpr int kOptional = 1;
};

static_assert(sizeof(TensorView) == 48, "host and device disagree on TensorView");
static_assert(sizeof(ScoreView) == 56, "host and device disagree on ScoreView");
static_assert(sizeof(ProblemShape) == 56, "host and device disagree on ProblemShape");
static_assert(sizeof(MaskParams) == 128, "host and device disagree on MaskParams");
static_assert(sizeof(BlockMask) == 16, "host and device disagree on BlockMask");
static_assert(sizeof(DropoutParams) == 32, "host and device disagree on DropoutParams");
static_assert(sizeof(TileCounter) == 16, "host and device disagree on TileCounter");
static_assert(sizeof(TileParts) == 16, "host and device disagree on TileParts");
static_assert(sizeof(ForwardParams) == 584, "host and device disagree on ForwardParams");
static_assert(sizeof(TangentParams) == 784, "host and device disagree on TangentParams");
static_assert(sizeof(BackwardParams) == 864, "host and device disagree on BackwardParams");
static_assert(sizeof(ArrayView) == 120, "host and device disagree on ArrayView");
static_assert(sizeof(ArrayTable) == 1920, "host and device disagree on ArrayTable");
static_assert(sizeof(WithArrays<ForwardParams>) == 2504, "host and device disagree on WithArrays");
static_assert(sizeof(WithArrays<TangentParams>) == 2704, "host and device disagree on WithArrays");
static_assert(sizeof(WithArrays<BackwardParams>) == 2784, "host and device disagree on WithArrays");
// Fields that features fill by their offsets (ParamsField of codegen/launch.py). NVRTC 13.0 has no
// offsetof; the sizes above make both compilers agree.
#ifndef __CUDACC_RTC__
#define MEMEFF_FIELD(path, offset)                                   \
  static_assert(__builtin_offsetof(ForwardParams, path) == offset && \
                __builtin_offsetof(BackwardParams, path) == offset)
MEMEFF_FIELD(dropout.key_words, 200);
MEMEFF_FIELD(dropout.batch_base, 208);
MEMEFF_FIELD(dropout.head_index, 216);
MEMEFF_FIELD(dropout.threshold, 224);
MEMEFF_FIELD(dropout.scale, 228);
#undef MEMEFF_FIELD
#endif

static_assert(sizeof(TensorMap) == 128, "host and device disagree on TensorMap");

}  // namespace memeff
