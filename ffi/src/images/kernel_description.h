// The description of a kernel by the code generator: text in front of its code, covered by the same
// digest. The rest of the call is checked against it once, before anything is loaded. Each fact has
// a line, in this order, with words separated by one space:
//
//   arch sm_90a
//   direction forward
//   dtype bf16
//   padded_dims 128 128                    largest H and Hv
//   tile 128 128                           queries and keys
//   alignment 16                           bytes that rows of query, key, ... start at multiples of
//   blocks_per_sm 1
//   entry NAME 384 232448 B*N*T/128 1 2 queries_128x128 maps
//                                          threads, dynamic shared memory, grid, its limit for each
//                                          SM or 0, CTAs of a cluster, block mask or -, maps or -
//   map query 64 64 1                      array, rows and columns of the TMA box, the dim of rows
//   array query bf16 B T N H               every operand and result of the call
//   captured sinks 4 zeroed                of the arrays: alignment in bytes; zeroed or -
//   field 200 key_words                    byte of the parameters: the address of an array, or
//                                          #1 for number 1 of the call, of 32 bits
//
// A dim of an array is a number, a name (of the same size wherever it appears), "N?" for N or 1,
// "B+1", "T/128" for the number of tiles, "N*4", "B~" for an array that a vmap broadcasts (any
// number of elements), or "*" for any size. "..." is an array of any shape.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "attributes/dims.h"
#include "images/array_dims.h"
#include "memeff/params.h"
#include "xla/ffi/api/ffi.h"

namespace memeff::host {

enum class Direction { kForward, kBackward, kTangent };

// The name of a direction in descriptions and seals.
std::string_view name_of(Direction direction);

struct EntryPoint {
  std::string name;
  int threads;
  int shared_bytes;  // dynamic
  Grid grid;
  std::string block_mask;  // the array; empty for none
  bool takes_maps;
};

// A tensor that a kernel copies by TMA, and the box of one copy.
struct MapBox {
  std::string name;
  int rows;
  int columns;
  int row_dim;  // 1 for [batch, sequence, head, dim], 2 for [batch, head, query, key]
};

// An array of a feature: an entry of ArrayTable.
struct CapturedArray {
  std::string name;
  int alignment;
  bool zeroed;
};

// A field of the parameters that a feature fills, with an address or a number of the call.
struct ParamsField {
  int offset;         // in bytes
  std::string array;  // empty for a number
  int number;
};

struct KernelDescription {
  int tile_query = 0;
  int tile_key = 0;
  int alignment = 0;
  int blocks_per_sm = 0;                 // at least, of the main kernel
  std::vector<EntryPoint> entry_points;  // in launch order
  std::vector<MapBox> maps;              // in the order of that parameter
  std::vector<CapturedArray> captured;   // in the order of ArrayTable
  std::vector<ParamsField> fields;
  ProblemShape shape = {};  // without pointers

  // Parses the text and checks the arrays of a call against it. longest_query and longest_key are T
  // and S of packed sequences, `numbers` the number of run-time numbers of the call.
  static xla::ffi::ErrorOr<KernelDescription> parse(std::string_view text, std::string_view arch,
                                                    Direction direction,
                                                    const std::vector<Array>& arrays,
                                                    long long longest_query, long long longest_key,
                                                    size_t numbers);
};

}  // namespace memeff::host
