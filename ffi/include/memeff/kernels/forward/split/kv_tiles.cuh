// The copies of the split forward's keys and values to shared memory.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/collective/copies/copied_rows.cuh>
#include <memeff/core/page_table.cuh>
#include <memeff/kernels/forward/split/operands.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/tensor_rows.cuh>

namespace memeff {

// Keys and values of a consumer group.
template <class Config, class Operands>
struct SplitKvTiles {
  using Tiles = SplitTiles<Config>;
  using ConsumerGroup = typename Tiles::ConsumerGroup;
  using KeyTile = typename Operands::KeyTile;
  using ValueTile = typename Operands::ValueTile;
  static constexpr int kStageBytes = KeyTile::kBytes + ValueTile::kBytes;

  template <class Tile>
  using Rows = CopiedRows<Tile, ConsumerGroup::kThreads, 16, RowPointer>;

  Rows<KeyTile> keys;
  Rows<ValueTile> values;
  PageWindow<Config> pages;
  int end;
  uint32_t shared;

  // KV blocks from `end` on are not copied. The buffers begin at `shared`.
  CUTE_DEVICE SplitKvTiles(ForwardParams const& params, KeyValueSource<Config> const& source,
                           int key_length, int end, uint32_t shared)
      : keys{{source.row(params.key)},
             row_bytes<KeyValueElement<Config>>(params.key),
             key_length,
             params.shape.head_dim},
        values{{source.row(params.value)},
               row_bytes<KeyValueElement<Config>>(params.value),
               key_length,
               params.shape.value_dim},
        pages{source.pages, key_length},
        end(end),
        shared(shared) {}

  // Starts the copies of a KV block. Past the end it commits an empty group, so that the counts of
  // the waits stay correct.
  CUTE_DEVICE void load(int tile, int stage, Operands const& operands) {
    if (tile < end) {
      int const group = Tiles::kGroupsTakeSegments ? 0 : ConsumerGroup::index();
      int const column = tile * Tiles::kTileKey + group * Tiles::kConsumerGroupKeys;
      uint32_t const stage_tiles = shared + stage * kStageBytes;
      pages.seek(column);
      keys.load(column, stage_tiles, pages, ConsumerGroup::thread());
      values.load(column, stage_tiles + KeyTile::kBytes, pages, ConsumerGroup::thread());
      operands.load_scales(column, stage, pages);
    }
    commit_copies();
  }
};

}  // namespace memeff
